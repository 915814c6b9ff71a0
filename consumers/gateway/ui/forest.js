// SPDX-License-Identifier: Apache-2.0
// Conversations as chains on the prefix forest: a chunk that several conversations begin with is drawn once, in the row of
// the first of them; the others branch off where they differ.

/**
 * Rows from the newest tree to the oldest, each with where it branches off: [{chain, start, parent}], `start` the first
 * chunk that is its own and `parent` the row that draws the one before. Only `most` rows, the newest chains'.
 */
export function rows(chains, most) {
  const newest = [...chains].sort((a, b) => b.at - a.at).slice(0, most);
  const root = { children: new Map(), at: 0, ends: [] };
  for (const chain of newest) {
    let node = root;
    chain.hashes.forEach((hash, depth) => {
      const name = depth ? hash : `${chain.instance}\n${hash}`; // one forest an engine
      if (!node.children.has(name)) node.children.set(name, { children: new Map(), at: 0, ends: [] });
      node = node.children.get(name);
      node.at = Math.max(node.at, chain.at);
    });
    node.ends.push(chain);
  }
  const found = [];
  const owners = []; // by depth: the row that draws the chunk there
  const pending = children(root, 0);
  while (pending.length) {
    const { node, depth, start } = pending.pop();
    const below = children(node, depth + 1);
    // What goes on stays in this row; an end of a chain on the way, and each further branch, is a row of its own.
    const ends = below.length ? node.ends : node.ends.slice(1);
    if (!below.length) add(node.ends[0], start);
    else { below[below.length - 1].start = start; }
    pending.push(...below.slice(0, -1), ...ends.map((chain) => ({ node: { children: new Map(), at: 0, ends: [chain] }, depth: depth + 1, start: depth + 1 })), ...below.slice(-1));
  }
  return found;

  function children(node, depth) {
    return [...node.children.values()].sort((a, b) => a.at - b.at).map((child) => ({ node: child, depth, start: depth }));
  }

  function add(chain, start) {
    const row = { chain, start, parent: start ? owners[start - 1] : null };
    for (let depth = start; depth < chain.hashes.length; depth += 1) owners[depth] = row;
    found.push(row);
  }
}

/** Hash -> the conversations that use it, engine by engine. */
export function users(chains) {
  const found = new Map();
  for (const chain of chains) for (const hash of new Set(chain.hashes)) {
    const key = `${chain.instance}\n${hash}`;
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(chain.name);
  }
  return found;
}
