// How strongly, and in which of two colours, a token is marked: blue below, orange above, both told apart by the colour-blind.

import { number } from "./format.js";

/** What tokens can be coloured by: {label, of(token), signed, unit, meaning}. */
export const MEASURES = {
  advantage: { label: "Advantage", of: (token) => token.advantage, signed: true, meaning: "as it was trained on" },
  kl: { label: "KL", of: (token) => token.kl, signed: true, meaning: "log-prob less the reference's, nats" },
  value: { label: "Value", of: (token) => token.value, signed: true, meaning: "what the critic expected" },
  log_prob: { label: "Log-prob", of: (token) => token.log_prob, signed: false, meaning: "nats; the stronger, the less probable" },
};

/** Names of the measures that these tokens have. */
export const measuresOf = (tokens) =>
  Object.keys(MEASURES).filter((name) => tokens.some((token) => Number.isFinite(MEASURES[name].of(token))));

/**
 * A scale over the tokens: {limit, place(value) in -1..1, paint(element, value), low, high}. Its end is the value that 98 in 100
 * tokens stay within, so that a single outlier does not leave all others pale.
 */
export function scaleOf(tokens, measure) {
  const { of, signed } = MEASURES[measure];
  const sizes = tokens.map(of).filter(Number.isFinite).map(Math.abs).sort((a, b) => a - b);
  const limit = sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes.at(-1) || 1;
  const place = (value) => Math.max(-1, Math.min(1, value / limit));
  const beyond = sizes.at(-1) > limit * 1.001;
  return {
    limit,
    place,
    signed,
    low: `${beyond ? "≤ " : ""}${number(-limit)}`,
    high: signed ? `${beyond ? "≥ " : ""}${number(limit)}` : "0",
    colour: (value) => colour(place(value), signed),
    gradient: signed
      ? `linear-gradient(90deg, ${colour(-1, true)}, ${colour(-0.5, true)}, transparent, ${colour(0.5, true)}, ${colour(1, true)})`
      : `linear-gradient(90deg, ${colour(-1, false)}, transparent)`,
  };
}

function colour(place, signed) {
  const hue = signed && place < 0 ? "var(--below)" : "var(--above)";
  return `rgba(${hue}, calc(var(--strength) * ${Math.abs(place).toFixed(3)}))`;
}
