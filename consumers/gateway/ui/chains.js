// SPDX-License-Identifier: Apache-2.0
// The conversations that finished requests told of, where their chunks are, and the drawing of both.
import { element } from "./dom.js";
import { rows, users } from "./forest.js";

const MAX_CHAINS = 200, MAX_ROWS = 40;
const small = matchMedia("(max-width: 600px)");
const TIERS = ["device", "cpu", "disk", "remote"];
const NAMES = { device: "on the device", cpu: "in DDR", disk: "on the SSD only", remote: "remote only", gone: "nowhere" };
const chains = new Map();  // instance, conversation -> {session, name, instance, hashes, tokens, hit, at}
const places = new Map();  // instance, hash -> tiers, as the last locate said
let clock = 0;

export const known = () => chains.values();

export function takeFinished(event) {
  const hashes = event.chunk_hashes || [];
  const key = `${event.instance}\n${event.session || event.request_id}`;
  const before = chains.get(key);
  if ((event.part || 1) > 1) { if (before) before.hashes.push(...hashes); return; }
  if (!hashes.length) return;
  chains.delete(key);
  chains.set(key, { session: event.session, name: event.session || event.request_id, instance: event.instance,
    hashes: [...hashes], tokens: event.prompt_tokens, hit: event.lmcache_hit_tokens || 0, at: clock += 1 });
  while (chains.size > MAX_CHAINS) chains.delete(chains.keys().next().value);
}

export function placed(instance, hashes, tiers) {
  hashes.forEach((hash, at) => places.set(`${instance}\n${hash}`, tiers[at] || []));
}

/** The hashes that are drawn, engine by engine: what is worth asking about. */
export function drawn() {
  const found = new Map();
  for (const { chain } of rows(chains.values(), MAX_ROWS)) {
    if (!found.has(chain.instance)) found.set(chain.instance, new Set());
    for (const hash of chain.hashes) found.get(chain.instance).add(hash);
  }
  return found;
}

function where(chain, hash) {
  const tiers = places.get(`${chain.instance}\n${hash}`);
  return tiers === undefined ? "" : TIERS.find((tier) => tiers.includes(tier)) || "gone";
}

/** Draws the forest; `act(op, chain)` is what a button does. */
export function drawChains(into, act) {
  const found = rows(chains.values(), MAX_ROWS);
  if (!found.length) {
    into.replaceChildren(element("p", { className: "none" }, "No finished request with chunk hashes yet."));
    return;
  }
  const using = users(chains.values());
  const longest = Math.max(...found.map(({ chain }) => chain.hashes.length));
  const group = Math.ceil(longest / (small.matches ? 50 : 150)); // chunks a cell
  const places = Math.ceil(longest / group);
  const number = new Map(found.map((row, at) => [row, at]));
  const lines = found.map((row) => {
    const track = element("div", { className: "track" }, ...cells(row, using, group, places));
    track.style.setProperty("--places", places);
    if (row.parent) track.append(branch(number.get(row) - number.get(row.parent), Math.floor((row.start - 1) / group) / places));
    return element("div", { className: "chain" }, head(row, using, act), track);
  });
  const more = chains.size - found.length;
  into.replaceChildren(...lines, ...(more > 0 ? [element("p", { className: "none" }, `and ${more} older conversations`)] : []));
}

function head({ chain, start }, using, act) {
  const counts = {};
  for (const hash of chain.hashes) { const tier = where(chain, hash); if (tier) counts[tier] = (counts[tier] || 0) + 1; }
  const shared = chain.hashes.filter((hash) => using.get(`${chain.instance}\n${hash}`).length > 1).length;
  const own = start === chain.hashes.length ? "none of its own" : "";
  const parts = [`${chain.hashes.length} chunks`, shared ? `${shared} shared` : "", own, `${chain.tokens} tokens, ${chain.hit} cached`];
  const tiers = Object.entries(counts).map(([tier, count]) => `${count} ${NAMES[tier]}`).join(", ");
  return element("div", { className: "head" },
    element("b", { title: `${chain.name} on ${chain.instance}` }, chain.name),
    element("small", { title: parts.filter(Boolean).join(" · ") }, parts.filter(Boolean).join(" · ")),
    element("small", { title: tiers }, tiers),
    element("div", { className: "actions" }, ...["prefetch", "evict"].map((op) =>
      element("button", { type: "button", onclick: () => act(op, chain), ariaLabel: `${op} ${chain.name}`,
        title: op === "evict" ? "Free its chunks from DDR, except those others use" : "Load its chunks from the SSD into DDR" }, op))));
}

function cells({ chain, start }, using, group, places) {
  const made = [];
  for (let at = Math.floor(start / group) * group; at < chain.hashes.length; at += group) {
    const own = chain.hashes.slice(Math.max(at, start), at + group);
    if (!own.length) continue;
    const tiers = own.map((hash) => where(chain, hash));
    const names = using.get(`${chain.instance}\n${own[0]}`);
    const tier = tiers.every((other) => other === tiers[0]) ? tiers[0] : tiers.includes("gone") ? "gone" : "disk";
    const cell = element("span", { className: ["cell", tier, names.length > 1 ? "shared" : ""].join(" ").trim(), data: { hash: own[0] },
      title: `${own.length > 1 ? `${own.length} chunks from ` : "chunk "}${own[0]}\n${names.length > 1 ? `shared by ${names.join(", ")}` : `of ${names[0]}`}${tier ? `\n${NAMES[tier]}` : ""}` });
    cell.style.left = `${100 * (at / group) / places}%`;
    made.push(cell);
  }
  if (!made.length) { // it ends inside another's chain
    made.push(element("span", { className: "end", title: "ends here" }));
    made[0].style.left = `calc(${100 * (Math.floor((start - 1) / group) / places)}% + 12px)`;
  }
  return made;
}

/** The line down to a row from where it branches off, so many rows above and at that part of the width. */
function branch(rows, left) {
  const line = element("span", { className: "branch" });
  line.style.left = `calc(${100 * left}% + 2px)`;
  line.style.setProperty("--rows", rows);
  return line;
}

/** What is drawn depends on the screen's size in one thing: how many chunks stand in a cell. */
export function onResize(draw) { small.addEventListener("change", draw); }
