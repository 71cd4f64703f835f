// Runs grouped by their settings: runs with equal configs but for name and seed are seeds of one setting.

import { leaves, shown } from "./config_tree.js";

const OWN = new Set(["run.name", "run.seed"]);

/** Return the settings of runs in the order of their first run: {label, runs: [index, ...]}. The label has what differs. */
export function settingsOf(configs) {
  const maps = configs.map((config) => new Map(leaves(config).filter(([path]) => !OWN.has(path))));
  const paths = [...new Set(maps.flatMap((map) => [...map.keys()]))];
  const different = paths.filter((path) => new Set(maps.map((map) => shown(map.get(path)))).size > 1);
  const groups = new Map();
  maps.forEach((map, index) => {
    const label = different.map((path) => `${shortName(path, different)} ${shown(map.get(path))}`).join(", ") || "all runs";
    if (!groups.has(label)) groups.set(label, { label, runs: [] });
    groups.get(label).runs.push(index);
  });
  return [...groups.values()];
}

function shortName(path, paths) {
  const last = nameOf(path);
  return paths.filter((other) => nameOf(other) === last).length > 1 ? path : last;
}

/** Return the last part of a path, with the one before it for an element of a list. */
function nameOf(path) {
  const parts = path.split(".");
  return parts.slice(/^\d+$/.test(parts.at(-1)) ? -2 : -1).join(".");
}

/** Return the mean of lines at each step, with the lowest and highest value as its band; null without data. */
export function meanLine(lines) {
  const present = lines.filter(Boolean);
  const values = new Map();
  for (const line of present) {
    line.x.forEach((step, at) => {
      if (line.y[at] === null) return;
      if (!values.has(step)) values.set(step, []);
      values.get(step).push(line.y[at]);
    });
  }
  const x = [...values.keys()].sort((a, b) => a - b);
  if (!x.length) return null;
  const column = (join) => x.map((step) => join(values.get(step)));
  const band = present.length > 1;
  return {
    x,
    y: column((all) => all.reduce((sum, value) => sum + value, 0) / all.length),
    low: band ? column((all) => Math.min(...all)) : null,
    high: band ? column((all) => Math.max(...all)) : null,
  };
}
