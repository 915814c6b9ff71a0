// SPDX-License-Identifier: Apache-2.0
// The page: asks the gateway for engines every two seconds, follows its event stream, and sends what the buttons say.
// Text from the bus is only ever set as text. The bearer token stays in this tab (sessionStorage).
import { spansOf, waterfall } from "./trace.js";

const MAX_CHAINS = 200, MAX_COMMANDS = 50, MIB = 2 ** 20;
const $ = (id) => document.getElementById(id);
const chains = new Map();   // conversation -> {session, instance, hashes, tokens, hit, requests, at}
const places = new Map();   // chunk hash -> tiers, as the last locate said
const commands = new Map(); // command id -> the gateway's answer
const totals = { requests: 0, tokens: 0, hit: 0, useful: 0, redundant: 0, late: 0, wasted: 0 };
let token = sessionStorage.getItem("semkv-token") || "";
let lastId = 0, redraw = 0;

export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  const { data, ...rest } = properties;
  Object.assign(made, rest);
  Object.assign(made.dataset, data || {});
  made.append(...children);
  return made;
}

const headers = (more = {}) => (token ? { ...more, Authorization: `Bearer ${token}` } : more);

class Refused extends Error {}

async function call(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers(options.headers) });
  if (answer.status === 401) { $("login").hidden = false; throw new Refused("a bearer token is needed"); }
  return answer;
}

function say(state, text) { $("state").dataset.state = state; $("state").textContent = text; }

// ---- engines

async function pollEngines() {
  try {
    const answer = await call("/memory/engines");
    const body = await answer.json();
    if (answer.ok) drawEngines(body.engines); else say("lost", body.error || `the gateway answers ${answer.status}`);
  } catch (error) { if (!(error instanceof Refused)) say("lost", "the gateway does not answer; trying again"); }
  setTimeout(pollEngines, 2000);
}

function drawEngines(ranks) {
  const rows = ranks.map((rank) => element("div", { className: "rank" },
    element("h3", {}, `${rank.instance}.${rank.rank} `,
      element("small", {}, `of ${rank.world_size} · ${rank.hash_domain.model} · domain ${rank.domain} · ${rank.inflight} in flight`)),
    ...rank.tiers.map((tier) => {
      const used = element("div", { className: `used ${tier.name}` });
      used.style.width = `${tier.capacity_bytes ? Math.min(100, 100 * tier.used_bytes / tier.capacity_bytes) : 0}%`;
      return element("div", { className: "tier" }, element("span", {}, tier.name), element("div", { className: "room" }, used),
        element("span", { className: "amount" }, `${(tier.used_bytes / MIB).toFixed(1)} of ${(tier.capacity_bytes / MIB).toFixed(0)} MiB, ${tier.chunks} chunks`));
    })));
  $("engines").replaceChildren(...(rows.length ? rows : [element("p", { className: "none" }, "No engine is live.")]));
}

// ---- events

async function follow() {
  for (;;) {
    try {
      const answer = await call(`/memory/events?type=finished&type=outcome&after=${lastId}`);
      if (!answer.ok) throw new Error(`${answer.status}`);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        rest += value;
        const blocks = rest.split("\n\n");
        rest = blocks.pop();
        blocks.forEach(take);
      }
      say("lost", "the stream ended; coming back");
    } catch (error) { say(error instanceof Refused ? "waiting" : "lost", error instanceof Refused ? "a token is needed" : "no events; trying again"); }
    await new Promise((again) => setTimeout(again, 1000));
  }
}

function take(block) {
  const fields = Object.fromEntries(block.split("\n").filter((line) => !line.startsWith(":")).map((line) => {
    const at = line.indexOf(":");
    return [line.slice(0, at), line.slice(at + 1).trimStart()];
  }));
  if (!fields.event) return;
  const data = JSON.parse(fields.data);
  if (fields.event === "ready") { say("live", "live"); return; }
  lastId = Math.max(lastId, Number(fields.id) || 0);
  if (fields.event === "finished") takeFinished(data);
  if (fields.event === "outcome") takeOutcome(data);
  if (!redraw) redraw = requestAnimationFrame(() => { redraw = 0; drawTotals(); drawChains(); });
}

function takeFinished(event) {
  const hashes = event.chunk_hashes || [];
  const key = `${event.instance}\n${event.session || event.request_id}`;
  const known = chains.get(key);
  if ((event.part || 1) > 1) { if (known) known.hashes.push(...hashes); return; }
  totals.requests += 1; totals.tokens += event.prompt_tokens; totals.hit += event.lmcache_hit_tokens || 0;
  if (!hashes.length) return;
  chains.delete(key);
  chains.set(key, { session: event.session, name: event.session || event.request_id, instance: event.instance,
    hashes: [...hashes], tokens: event.prompt_tokens, hit: event.lmcache_hit_tokens || 0, requests: (known?.requests || 0) + 1 });
  while (chains.size > MAX_CHAINS) chains.delete(chains.keys().next().value);
}

function takeOutcome(event) {
  for (const fate of ["useful", "redundant", "late", "wasted"]) totals[fate] += event[fate] || 0;
  if (!commands.has(event.command_id)) look(event.command_id);
}

function drawTotals() {
  for (const name of ["requests", "useful", "redundant", "late", "wasted"]) $(name).textContent = totals[name];
  $("share").textContent = totals.tokens ? `${Math.round(100 * totals.hit / totals.tokens)} %` : "–";
}

// ---- conversations

function drawChains() {
  const users = new Map();
  for (const chain of chains.values()) for (const hash of new Set(chain.hashes)) users.set(hash, (users.get(hash) || 0) + 1);
  const rows = [...chains.values()].reverse().map((chain) => element("div", { className: "chain" },
    element("div", { className: "head" }, element("b", {}, chain.name),
      element("span", {}, `${chain.instance} · ${chain.hashes.length} chunks · ${chain.tokens} tokens, ${chain.hit} from the cache`),
      element("div", { className: "actions" }, ...["locate", "prefetch", "evict"].map((op) =>
        element("button", { type: "button", onclick: () => command(op, chain), ariaLabel: `${op} ${chain.name}` }, op)))),
    element("div", { className: "cells" }, ...chain.hashes.map((hash) => {
      const tiers = places.get(hash);
      const shared = users.get(hash) > 1;
      const where = tiers === undefined ? "" : tiers.length ? ["device", "cpu", "disk"].find((tier) => tiers.includes(tier)) || "" : "gone";
      return element("span", { className: ["cell", where, shared && where !== "gone" ? "shared" : ""].join(" ").trim(), data: { hash },
        title: `${hash}\n${shared ? `used by ${users.get(hash)} conversations` : "used by this conversation"}${tiers ? `\n${tiers.join(", ") || "nowhere"}` : ""}` });
    }))));
  $("chains").replaceChildren(...(rows.length ? rows : [element("p", { className: "none" }, "No finished request yet.")]));
}

$("chains").addEventListener("pointerover", (event) => {
  const hash = event.target.dataset?.hash;
  for (const cell of $("chains").querySelectorAll(".lit")) cell.classList.remove("lit");
  if (hash) for (const cell of $("chains").querySelectorAll(`[data-hash="${CSS.escape(hash)}"]`)) cell.classList.add("lit");
});

// ---- commands

async function command(op, chain) {
  const body = { chunk_hashes: [...new Set(chain.hashes)], instance: chain.instance };
  if (op === "evict") body.locations = ["LocalCPUBackend"];
  if (op === "prefetch") body.lookup_id = "ui";
  if (op !== "locate" && chain.session) body.session = chain.session;
  try {
    const answer = await call(`/memory/${op}?wait=30`, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });
    const report = await answer.json();
    if (op === "locate" && report.chunk_tiers) body.chunk_hashes.forEach((hash, at) => places.set(hash, report.chunk_tiers[at]));
    if (report.command_id) keep(report); else say("lost", report.error || `${op}: ${answer.status}`);
    if (op !== "locate") await command("locate", chain); else drawChains();
  } catch (error) { if (!(error instanceof Refused)) say("lost", `${op}: ${error.message}`); }
}

async function look(id) {
  try { const answer = await call(`/memory/commands/${encodeURIComponent(id)}`); if (answer.ok) keep(await answer.json()); } catch { /* its results are forgotten */ }
}

function keep(report) {
  if (report.op === "locate") return;
  commands.set(report.command_id, report);
  while (commands.size > MAX_COMMANDS) commands.delete(commands.keys().next().value);
  const head = element("tr", {}, ...["command", "rank", "state", "chunks", "queued ms", "ran ms", "trace"].map((text) => element("th", {}, text)));
  const rows = [...commands.values()].reverse().flatMap((found) => found.ranks.map((rank, at) => element("tr", {},
    element("td", {}, at ? "" : `${found.op} …${found.command_id.slice(-6)}`), element("td", {}, `${rank.instance}.${rank.rank}`),
    element("td", { className: ["failed", "rejected", "unanswered"].includes(rank.state) ? "bad" : "" }, rank.state || "running"),
    element("td", {}, Object.entries(rank.counts || {}).filter(([, n]) => n).map(([status, n]) => `${n} ${status}`).join(", ") || rank.reason || ""),
    element("td", { className: "num" }, (rank.queued_ms ?? 0).toFixed(1)), element("td", { className: "num" }, (rank.ran_ms ?? 0).toFixed(1)),
    element("td", {}, rank.trace_id ? element("a", { href: `http://${location.hostname}:16686/trace/${rank.trace_id}`, target: "_blank", rel: "noopener" }, rank.trace_id.slice(0, 8)) : ""))));
  $("commands").replaceChildren(element("div", { className: "scroll" }, element("table", {}, head, ...rows)));
}

// ---- trace

$("file").addEventListener("change", async () => {
  try {
    const traces = spansOf(await $("file").files[0].text());
    $("traces").replaceChildren(...[...traces].map(([id, spans]) => element("option", { value: id }, `${id.slice(0, 8)} · ${spans[0].name} · ${spans.length} spans`)));
    $("which").hidden = traces.size < 2;
    const show = () => $("waterfall").replaceChildren(...waterfall(traces.get($("traces").value), element));
    $("traces").onchange = show;
    show();
  } catch (error) { $("waterfall").replaceChildren(element("p", { className: "bad" }, `not an OTLP JSON file: ${error.message}`)); }
});

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  sessionStorage.setItem("semkv-token", token);
  $("login").hidden = true;
});

pollEngines();
follow();
