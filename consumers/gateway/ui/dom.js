// SPDX-License-Identifier: Apache-2.0
// Small things every part of the page uses. Text is only ever set as text.

export const $ = (id) => document.getElementById(id);

/** An element with properties (data-* under `data`, attributes under `attributes`) and children. */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  const { data, attributes, ...rest } = properties;
  Object.assign(made, rest);
  Object.assign(made.dataset, data || {});
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Calls `draw` once before the next frame, however often it is asked. */
export function soon(draw) {
  let asked = 0;
  return () => { if (!asked) asked = requestAnimationFrame(() => { asked = 0; draw(); }); };
}
