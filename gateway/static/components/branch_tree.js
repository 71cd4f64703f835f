// The branches of an episode as a tree: one is shown, and a press shows another.

import { h } from "../dom.js";
import { whole } from "../format.js";

/** Largest indentation, in levels: a chain of many branches stays readable. */
const MAX_LEVELS = 8;

/** Return the branches in the order of the tree: each after its parent, with its index and its level. */
export function treeOrder(branches) {
  const below = new Map();
  branches.forEach(({ parent }, index) => below.set(parent, [...(below.get(parent) ?? []), index]));
  const order = [];
  const waiting = (below.get(-1) ?? []).map((index) => [index, 0]).reverse();
  while (waiting.length) {
    const [index, level] = waiting.pop();
    order.push({ branch: branches[index], index, level });
    waiting.push(...(below.get(index) ?? []).map((each) => [each, level + 1]).reverse());
  }
  return order;
}

/** A number with its noun: "1 turn", "2 turns". */
export const count = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

/** Return what a branch is: its origin, turns and tokens. */
function description({ parent, shared_tokens: shared, segments }) {
  const turns = segments.filter(({ role }) => role === "policy");
  const tokens = turns.reduce((sum, turn) => sum + turn.tokens, 0);
  const origin = parent < 0 ? "" : `from branch ${whole(parent)} after ${count(shared, "token")}, `;
  return `${origin}${count(turns.length, "turn")}, ${count(tokens, "token")} of the policy`;
}

/** Tree of `branches`, of which the one at `shown` is pressed. Calls `onchange(index)`. */
export function branchTree(branches, shown, onchange) {
  const items = treeOrder(branches).map(({ branch, index, level }) =>
    h(
      "li",
      { style: { "padding-left": `${Math.min(level, MAX_LEVELS) * 18}px` } },
      h("button", { class: "button", type: "button", "aria-pressed": String(index === shown), onclick: () => onchange(index) }, `Branch ${whole(index)}`),
      h("span", { class: "muted small" }, description(branch)),
    ),
  );
  return h("ul", { class: "branches", "aria-label": "Branches of the episode" }, items);
}
