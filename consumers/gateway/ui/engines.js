// SPDX-License-Identifier: Apache-2.0
// Engines and their tiers, filling and emptying: a bar for now, a line for the last two minutes.
import { element } from "./dom.js";

const SAMPLES = 120;
const NAMES = { cpu: "DDR", disk: "SSD", device: "device", remote: "remote" };
const history = new Map(); // instance.rank.tier -> shares, the newest last
let shown = null; // until the gateway has told

const share = (tier) => (tier.capacity_bytes ? Math.min(1, tier.used_bytes / tier.capacity_bytes) : 0);
const key = (rank, tier) => `${rank.instance}\n${rank.rank}\n${tier.name}`;

export function takeEngines(ranks) { shown = ranks; }

/** Once a second: how full each tier is, also while nothing changes. */
export function sample() {
  const live = new Set();
  for (const rank of shown || []) for (const tier of rank.tiers) {
    const line = history.get(key(rank, tier)) || [];
    live.add(key(rank, tier));
    line.push(share(tier));
    if (line.length > SAMPLES) line.shift();
    history.set(key(rank, tier), line);
  }
  for (const name of history.keys()) if (!live.has(name)) history.delete(name);
}

export function drawEngines(into) {
  if (!shown) return;
  const rows = shown.map((rank) => element("div", { className: "rank" },
    element("h3", {}, `${rank.instance}.${rank.rank} `, element("small", {}, about(rank))),
    ...rank.tiers.map((tier) => element("div", { className: "tier" }, element("span", {}, NAMES[tier.name] || tier.name),
      bar(tier), line(history.get(key(rank, tier)) || [], tier.name), element("span", { className: "amount" }, amount(tier))))));
  into.replaceChildren(...(rows.length ? rows : [element("p", { className: "none" },
    "No engine is live. One that runs with SEMKV_NATS_URL set to this server shows up by itself.")]));
}

function about(rank) {
  const parts = [rank.hash_domain.model.split("/").pop(), rank.role === "storage" ? "" : rank.role, `domain ${rank.domain}`];
  if (rank.world_size > 1) parts.unshift(`of ${rank.world_size} ranks`);
  if (rank.inflight) parts.push(`${rank.inflight} commands in flight`);
  return parts.filter(Boolean).join(" · ");
}

function bar(tier) {
  const used = element("div", { className: `used ${tier.name}` });
  used.style.width = `${100 * share(tier)}%`;
  return element("div", { className: "room", attributes: { role: "img", "aria-label": `${Math.round(100 * share(tier))} % full` } }, used);
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

function amount(tier) {
  // Both in the unit of the larger, which is the room where there is a bound.
  const unit = Math.min(UNITS.length - 1, Math.floor(Math.log2(Math.max(tier.capacity_bytes, tier.used_bytes, 1)) / 10));
  const told = (bytes) => { const value = bytes / 2 ** (10 * unit); return value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toPrecision(2); };
  const room = tier.capacity_bytes ? `${told(tier.used_bytes)} of ${told(tier.capacity_bytes)}` : told(tier.used_bytes);
  return `${room} ${UNITS[unit]} · ${tier.chunks} chunks`;
}

function line(shares, name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${SAMPLES} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", `history ${name}`);
  svg.setAttribute("aria-hidden", "true");
  const drawn = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  const first = SAMPLES - shares.length;
  drawn.setAttribute("points", shares.map((value, at) => `${first + at},${19 - 18 * value}`).join(" "));
  svg.append(drawn);
  return svg;
}
