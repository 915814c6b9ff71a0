// SPDX-License-Identifier: Apache-2.0
// Everybody's commands with each rank's answer, as the ranks give them, and what prefetches were worth.
import { element } from "./dom.js";

const MAX = 40;
const commands = new Map(); // id -> {op, id, client, ranks: Map, outcome}
const HIDDEN = new Set(["locate"]); // the page asks where chunks are by itself

export function takeAnswer(kind, answer) {
  if (HIDDEN.has(answer.op)) return;
  const found = of(answer.command_id, answer);
  const name = `${answer.instance}.${answer.rank}`;
  if (kind === "accepted" && found.ranks.has(name)) return;
  found.ranks.set(name, kind === "accepted" ? { state: "running", queued_ms: answer.queued_ms } : answer);
}

export function takeOutcome(event) {
  const found = commands.get(event.command_id);
  if (found) found.outcome = ["useful", "redundant", "late", "wasted"].filter((fate) => event[fate]).map((fate) => `${event[fate]} ${fate}`).join(", ");
}

function of(id, { op, client }) {
  if (!commands.has(id)) commands.set(id, { op, id, client, ranks: new Map(), outcome: "" });
  while (commands.size > MAX) commands.delete(commands.keys().next().value);
  return commands.get(id);
}

const COLUMNS = ["command", "rank", "state", "chunks", "MB", "queued ms", "ran ms", "trace"];

export function drawCommands(into, openTrace) {
  if (!commands.size) {
    into.replaceChildren(element("p", { className: "none" }, "None since this page was opened. Everybody's commands show up here as ranks answer them."));
    return;
  }
  const head = element("tr", {}, ...COLUMNS.map((text) => element("th", { className: /MB|ms/.test(text) ? "num" : "" }, text)));
  const body = [...commands.values()].reverse().map((found) => element("tbody", {},
    ...[...found.ranks].sort(([a], [b]) => a.localeCompare(b, undefined, { numeric: true })).map(([name, rank], at) => element("tr", {},
      element("td", { title: found.id }, at ? "" : element("b", {}, found.op), at ? "" : element("span", { className: "id" }, ` …${found.id.slice(-6)}`)),
      element("td", {}, name),
      element("td", { className: `state ${rank.state}` }, rank.state),
      element("td", { className: "chunks" }, counts(rank) || rank.reason || "", at || !found.outcome ? null : element("div", { className: "outcome" }, `later: ${found.outcome}`)),
      number(rank.bytes_by_tier ? Object.values(rank.bytes_by_tier).reduce((sum, size) => sum + size, 0) / 1e6 : null),
      number(rank.queued_ms), number(rank.ran_ms),
      element("td", {}, rank.trace_id ? element("button", { type: "button", className: "link", onclick: () => openTrace(rank.trace_id), title: rank.trace_id }, rank.trace_id.slice(0, 6)) : ""))),
    element("tr", { className: "by" }, element("td", { colSpan: COLUMNS.length }, `by ${found.client}`))));
  into.replaceChildren(element("div", { className: "scroll" }, element("table", {}, element("thead", {}, head), ...body)));
}

const counts = (rank) => Object.entries(rank.counts || {}).filter(([, count]) => count).map(([status, count]) => `${count} ${status.replaceAll("_", " ")}`).join(", ");
const number = (value) => element("td", { className: "num" }, value === null || value === undefined ? "" : value.toFixed(1));
