// States, health and guard actions: always a word with an icon, never colour alone.

import { h } from "../dom.js";
import { icon } from "../icons.js";

const STATES = {
  starting: ["dots", "accent"],
  training: ["play", "good"],
  paused: ["pause", "warn"],
  recovering: ["again", "warn"],
  finished: ["check", "accent"],
  stopped: ["stop", null],
  failed: ["cross", "bad"],
  idle: ["circle", null],
};

const HEALTH = {
  serving: ["check", "good", "serving"],
  not_serving: ["warn", "warn", "not serving"],
  unreachable: ["cross", "bad", "unreachable"],
};

const ACTIONS = { warn: ["warn", "warn"], pause: ["pause", "warn"], stop: ["stop", "bad"] };

function pill(shape, tone, text) {
  return h("span", { class: "pill", "data-tone": tone }, icon(shape, 14), text);
}

/** Where a run stands. */
export const statePill = (state) => pill(...(STATES[state] ?? ["circle", null]), state);

/** How a service is. */
export const healthPill = (health) => pill(...(HEALTH[health] ?? ["circle", null, health]));

/** What a guard does, or did. */
export const actionPill = (action) => pill(...(ACTIONS[action] ?? ["circle", null]), action);

/** good, warn or bad: the colour that goes with a health. */
export const toneOf = (health) => HEALTH[health]?.[1] ?? null;
