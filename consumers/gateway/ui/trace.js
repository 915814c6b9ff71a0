// SPDX-License-Identifier: Apache-2.0
// OTLP JSON as traces, and a trace as a waterfall. Pure but for the element maker it is given.

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
      traces.get(span.traceId).push({ id: span.spanId, parent: span.parentSpanId || "", name: span.name, service, start, end,
        links: (span.links || []).length, bad: span.status?.code === 2 });
    }
  }
  if (!traces.size) throw new Error("no spans in it");
  for (const spans of traces.values()) spans.sort((a, b) => (a.start < b.start ? -1 : a.start > b.start ? 1 : 0));
  return new Map([...traces].sort((a, b) => b[1].length - a[1].length));
}

/** One row a span, children below and indented under their parent. */
export function waterfall(spans, element) {
  const first = spans.reduce((least, span) => (span.start < least ? span.start : least), spans[0].start);
  const last = spans.reduce((most, span) => (span.end > most ? span.end : most), spans[0].end);
  const total = Math.max(Number(last - first), 1);
  const known = new Set(spans.map((span) => span.id));
  const rows = [];
  const add = (span, depth) => {
    const bar = element("div", { className: `bar ${span.name.startsWith("queue") ? "queue" : ""} ${span.bad ? "bad" : ""}` });
    bar.style.left = `${100 * Number(span.start - first) / total}%`;
    bar.style.width = `${100 * Number(span.end - span.start) / total}%`;
    const name = element("span", { className: "name", title: span.name }, span.name.replace("semkv.v1.{tenant}.{domain}.", "…") + (span.links ? ` ⇠${span.links}` : ""));
    name.style.paddingLeft = `${depth * 0.9}rem`;
    rows.push(element("div", { className: "span" }, name, element("span", { className: "service" }, span.service),
      element("div", { className: "lane" }, bar), element("span", { className: "took" }, `${(Number(span.end - span.start) / 1e6).toFixed(2)} ms`)));
    for (const child of spans) if (child.parent === span.id) add(child, depth + 1);
  };
  for (const span of spans) if (!known.has(span.parent)) add(span, 0);
  return rows;
}
