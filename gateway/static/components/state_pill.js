// Labels of run states, service health and guard actions. Each has text and an icon, so that colour is not needed.

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

/** Return the label of a run state. */
export const statePill = (state) => pill(...(STATES[state] ?? ["circle", null]), state);

/** Return the label of a service's health. */
export const healthPill = (health) => pill(...(HEALTH[health] ?? ["circle", null, health]));

/** Return the label of a guard action. */
export const actionPill = (action) => pill(...(ACTIONS[action] ?? ["circle", null]), action);

/** Return the colour of a service's health: good, warn, bad, or null. */
export const toneOf = (health) => HEALTH[health]?.[1] ?? null;
