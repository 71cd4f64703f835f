// A config tree to open and close.

import { h } from "../dom.js";

/** `matches(path, value)` marks leaves; where it is given, only branches with a mark are kept. */
export function tree(value, matches = null) {
  return h("div", { class: "tree mono" }, branch(value, "", matches));
}

function branch(value, path, matches) {
  return Object.entries(value).map(([key, item]) => {
    const place = path ? `${path}.${key}` : key;
    if (isBranch(item)) {
      const inside = branch(item, place, matches).filter(Boolean);
      if (!inside.length) return null;
      const open = matches !== null || path === "";
      return h("details", { open }, h("summary", {}, key), h("div", {}, inside));
    }
    const found = matches?.(place, item);
    if (matches && !found) return null;
    return h("div", { class: "leaf" }, h("span", {}, `${key}: `), found ? h("mark", {}, shown(item)) : shown(item));
  });
}

const isBranch = (item) => item !== null && typeof item === "object" && Object.keys(item).length > 0;

/** A value as the YAML file would have it. */
export function shown(value) {
  if (value === undefined) return "–";
  if (value === null) return "null";
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** All leaves as [path, value]. */
export function leaves(value, path = "") {
  return Object.entries(value).flatMap(([key, item]) => {
    const place = path ? `${path}.${key}` : key;
    return isBranch(item) ? leaves(item, place) : [[place, item]];
  });
}
