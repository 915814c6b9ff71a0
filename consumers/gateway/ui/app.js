// SPDX-License-Identifier: Apache-2.0
// The page: follows the gateway's event stream and puts its parts together. Text from the bus is only ever set as text.
import { $, element, soon } from "./dom.js";
import { Refused, call, follow, onTokenWanted, post, setToken } from "./gateway.js";
import { drawEngines, sample, takeEngines } from "./engines.js";
import { drawChains, drawn, onResize, placed, takeFinished } from "./chains.js";
import { drawCommands, takeAnswer, takeOutcome } from "./commands.js";
import { spansOf, waterfall } from "./trace.js";

const BACK = 500;          // older events to begin with
const LOCATE_MS = 1500;    // at most one question a time where chunks are
const LOCATE_MOST = 4096;
const totals = { requests: 0, tokens: 0, hit: 0, useful: 0, redundant: 0, late: 0, wasted: 0 };

function say(state, text) {
  if (state === "live" && $("state").dataset.state !== "live") notice(""); // what was wrong meanwhile is over
  $("state").dataset.state = state;
  $("state").textContent = text;
}

const draw = {
  engines: soon(() => drawEngines($("engines"))),
  chains: soon(() => drawChains($("chains"), act)),
  commands: soon(() => drawCommands($("commands"), openTrace)),
  totals: soon(() => {
    for (const name of ["requests", "useful", "redundant", "late", "wasted"]) $(name).textContent = totals[name];
    $("share").textContent = totals.tokens ? `${Math.round(100 * totals.hit / totals.tokens)} %` : "–";
  }),
};

const TAKE = {
  bus: ({ connected }) => (connected ? say("live", "live") : say("lost", "NATS is away; the gateway goes on trying")),
  engines: ({ engines }) => { takeEngines(engines); draw.engines(); locateSoon(); },
  finished: (event) => {
    if ((event.part || 1) === 1) { totals.requests += 1; totals.tokens += event.prompt_tokens; totals.hit += event.lmcache_hit_tokens || 0; }
    takeFinished(event); draw.totals(); draw.chains(); locateSoon();
  },
  outcome: (event) => {
    for (const fate of ["useful", "redundant", "late", "wasted"]) totals[fate] += event[fate] || 0;
    takeOutcome(event); draw.totals(); draw.commands();
  },
  accepted: (answer) => { takeAnswer("accepted", answer); draw.commands(); },
  result: (answer) => { takeAnswer("result", answer); draw.commands(); if (answer.op === "prefetch" || answer.op === "evict") locateSoon(); },
};

// ---- where chunks are: asked when something may have moved, not on a timer

let asked = 0, again = false;
function locateSoon() {
  if (!$("locating").checked || document.hidden) return;
  if (asked) { again = true; return; }
  asked = setTimeout(async () => {
    await locate();
    asked = 0;
    if (again) { again = false; locateSoon(); }
  }, LOCATE_MS);
}

async function locate() {
  for (const [instance, hashes] of drawn()) {
    const wanted = [...hashes].slice(0, LOCATE_MOST);
    try {
      const answer = await post("/memory/locate?wait=5", { chunk_hashes: wanted, instance });
      if (answer.chunk_tiers) placed(instance, wanted, answer.chunk_tiers);
    } catch { /* the stream says when the gateway is away */ }
  }
  draw.chains();
}

// ---- what the buttons do

async function act(op, chain) {
  const body = { chunk_hashes: [...new Set(chain.hashes)], instance: chain.instance };
  if (op === "evict") body.locations = ["LocalCPUBackend"]; else body.lookup_id = "ui";
  if (chain.session) body.session = chain.session;
  try {
    const answer = await post(`/memory/${op}?wait=30`, body);
    notice(answer.error ? `${op} ${chain.name}: ${answer.error}` : "");
  } catch (error) { if (!(error instanceof Refused)) notice(`${op} ${chain.name}: ${error.message}`); }
}

function notice(text) { $("notice").textContent = text; $("notice").hidden = !text; }

// ---- trace

let opened = new Map();
function showTraces(traces, chosen) {
  opened = traces;
  $("traces").replaceChildren(...[...traces].map(([id, spans]) => element("option", { value: id }, `${id.slice(0, 8)} · ${spans[0].name.replace("semkv.v1.{tenant}.{domain}.", "…")} · ${spans.length} spans`)));
  $("which").hidden = traces.size < 2;
  $("traces").value = chosen || [...traces.keys()][0];
  showTrace();
}
function showTrace() { $("waterfall").replaceChildren(...waterfall(opened.get($("traces").value), element, openTrace)); }
function traceFailed(text) { $("waterfall").replaceChildren(element("p", { className: "bad" }, text)); }

async function openTrace(id) {
  $("h-trace").scrollIntoView({ block: "nearest" });
  if (opened.has(id)) { $("traces").value = id; showTrace(); return; }
  try {
    const answer = await call(`/memory/traces/${encodeURIComponent(id)}`);
    const text = await answer.text();
    if (answer.ok) showTraces(spansOf(text), id); else traceFailed(JSON.parse(text).error.replace(/^trace_id: /, ""));
  } catch (error) { if (!(error instanceof Refused)) traceFailed(error.message); }
}

$("traces").addEventListener("change", showTrace);
$("file").addEventListener("change", async () => {
  try { showTraces(spansOf(await $("file").files[0].text())); } catch (error) { traceFailed(`not an OTLP JSON file: ${error.message}`); }
});

// ---- the whole

onTokenWanted(() => { $("login").hidden = false; });
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken($("token").value);
  $("login").hidden = true;
});
$("locating").addEventListener("change", locateSoon);
document.addEventListener("visibilitychange", locateSoon);
onResize(draw.chains);
setInterval(() => { sample(); if (!document.hidden) draw.engines(); }, 1000);
follow(Object.keys(TAKE), BACK, (name, data) => TAKE[name]?.(data), say);
