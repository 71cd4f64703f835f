// A collapsible view of a config tree.

import { h } from "../dom.js";

/** Return the tree. If `matches(path, value)` is given, only matching leaves are shown, highlighted. */
export function tree(value, matches = null) {
  return h("div", { class: "tree mono" }, branch(value, "", matches));
}

function branch(value, path, matches) {
  return Object.entries(value).map(([key, item]) => {
    const childPath = path ? `${path}.${key}` : key;
    if (isBranch(item)) {
      const inside = branch(item, childPath, matches).filter(Boolean);
      if (!inside.length) return null;
      const open = matches !== null || path === "";
      return h("details", { open }, h("summary", {}, key), h("div", {}, inside));
    }
    const matched = matches?.(childPath, item);
    if (matches && !matched) return null;
    return h("div", { class: "leaf" }, h("span", {}, `${key}: `), matched ? h("mark", {}, shown(item)) : shown(item));
  });
}

const isBranch = (item) => item !== null && typeof item === "object" && Object.keys(item).length > 0;

/** Return a value as in the YAML file. */
export function shown(value) {
  if (value === undefined) return "–";
  if (value === null) return "null";
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Return all leaves as [path, value] pairs. */
export function leaves(value, path = "") {
  return Object.entries(value).flatMap(([key, item]) => {
    const childPath = path ? `${path}.${key}` : key;
    return isBranch(item) ? leaves(item, childPath) : [[childPath, item]];
  });
}
