// SPDX-License-Identifier: Apache-2.0
// OTLP JSON as traces, and a trace as a waterfall: waiting is hatched, a link to another trace opens it.

/** Trace id -> spans by start, the longest trace first. Takes one document, or one a line. Throws on anything else. */
export function spansOf(text) {
  let documents;
  try { documents = [JSON.parse(text)]; } catch { documents = text.split("\n").filter((line) => line.trim()).map((line) => JSON.parse(line)); }
  const traces = new Map();
  for (const document of documents) for (const resource of (document.result || document).resourceSpans) {
    const service = (resource.resource?.attributes || []).find((a) => a.key === "service.name")?.value.stringValue || "?";
    for (const scope of resource.scopeSpans || []) for (const span of scope.spans || []) {
      const start = BigInt(span.startTimeUnixNano), end = BigInt(span.endTimeUnixNano);
      if (!traces.has(span.traceId)) traces.set(span.traceId, []);
      traces.get(span.traceId).push({ id: span.spanId, trace: span.traceId, parent: span.parentSpanId || "", name: span.name, service, start, end,
        links: [...new Set((span.links || []).map((link) => link.traceId))].filter((id) => id !== span.traceId),
        waits: span.name === "queue", bad: span.status?.code === 2, about: about(span) });
    }
  }
  if (!traces.size) throw new Error("no spans in it");
  for (const spans of traces.values()) spans.sort((a, b) => (a.start < b.start ? -1 : a.start > b.start ? 1 : b.waits - a.waits));
  return new Map([...traces].sort((a, b) => b[1].length - a[1].length));
}

function about(span) {
  const values = Object.fromEntries((span.attributes || []).map(({ key, value }) => [key, Object.values(value || {})[0]]));
  const parts = Object.entries(values).filter(([key]) => key.startsWith("kv.chunks.")).map(([key, count]) => `${count} ${key.slice(10).replaceAll("_", " ")}`);
  if (Number(values["kv.bytes"])) parts.push(`${(Number(values["kv.bytes"]) / 1e6).toFixed(1)} MB`);
  return span.name === "queue" ? "waiting" : parts.join(", ");
}

/** One row a span, children below and indented under their parent. `open(id)` opens a linked trace. */
export function waterfall(spans, element, open) {
  const first = spans.reduce((least, span) => (span.start < least ? span.start : least), spans[0].start);
  const last = spans.reduce((most, span) => (span.end > most ? span.end : most), spans[0].end);
  const total = Math.max(Number(last - first), 1);
  const known = new Set(spans.map((span) => span.id));
  const rows = [element("p", { className: "key" }, `trace ${spans[0].trace} · ${spans.length} spans · ${(total / 1e6).toFixed(1)} ms`)];
  const add = (span, depth) => {
    const bar = element("div", { className: `bar ${span.waits ? "waits" : ""} ${span.bad ? "bad" : ""}` });
    bar.style.left = `min(${100 * Number(span.start - first) / total}%, 100% - 2px)`;
    bar.style.width = `${100 * Number(span.end - span.start) / total}%`;
    const name = element("span", { className: "name", title: span.name }, span.name.replace("semkv.v1.{tenant}.{domain}.", "…"));
    name.style.paddingLeft = `${depth * 0.9}rem`;
    const links = span.links.map((id) => element("button", { type: "button", className: "link", onclick: () => open(id), title: `this span is linked to trace ${id}` }, `→ ${id.slice(0, 6)}`));
    rows.push(element("div", { className: "span" }, name, element("span", { className: "service" }, span.service),
      element("div", { className: "lane" }, bar), element("span", { className: "took" }, `${(Number(span.end - span.start) / 1e6).toFixed(2)} ms`),
      element("span", { className: "about" }, span.about, ...links)));
    for (const child of spans) if (child.parent === span.id && child !== span) add(child, depth + 1);
  };
  for (const span of spans) if (!known.has(span.parent)) add(span, 0);
  return rows;
}
