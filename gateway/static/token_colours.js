// Colours of tokens by a measure: blue for negative, orange for positive values, a colour-blind-safe pair.

import { number } from "./format.js";

/** Measures to colour tokens by: {label, of(token), signed, meaning}. */
export const MEASURES = {
  advantage: { label: "Advantage", of: (token) => token.advantage, signed: true, meaning: "used in the update" },
  kl: { label: "KL", of: (token) => token.kl, signed: true, meaning: "log-prob minus reference log-prob, nats" },
  value: { label: "Value", of: (token) => token.value, signed: true, meaning: "estimate of the critic" },
  log_prob: { label: "Log-prob", of: (token) => token.log_prob, signed: false, meaning: "nats; stronger colours are less probable" },
};

/** Return the names of the measures that the tokens have. */
export const measuresOf = (tokens) =>
  Object.keys(MEASURES).filter((name) => tokens.some((token) => Number.isFinite(MEASURES[name].of(token))));

/**
 * Return a colour scale: {limit, position(value) in -1..1, signed, low, high, colour(value), gradient}. `limit` is the 98th percentile of
 * the absolute values, so that a single outlier does not make all other tokens pale.
 */
export function scaleOf(tokens, measure) {
  const { of, signed } = MEASURES[measure];
  const sizes = tokens.map(of).filter(Number.isFinite).map(Math.abs).sort((a, b) => a - b);
  const limit = sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes.at(-1) || 1;
  const position = (value) => Math.max(-1, Math.min(1, value / limit));
  const beyond = sizes.at(-1) > limit * 1.001;
  return {
    limit,
    position,
    signed,
    low: `${beyond ? "≤ " : ""}${number(-limit)}`,
    high: signed ? `${beyond ? "≥ " : ""}${number(limit)}` : "0",
    colour: (value) => colour(position(value), signed),
    gradient: signed
      ? `linear-gradient(90deg, ${colour(-1, true)}, ${colour(-0.5, true)}, transparent, ${colour(0.5, true)}, ${colour(1, true)})`
      : `linear-gradient(90deg, ${colour(-1, false)}, transparent)`,
  };
}

function colour(position, signed) {
  const hue = signed && position < 0 ? "var(--below)" : "var(--above)";
  return `rgba(${hue}, calc(var(--strength) * ${Math.abs(position).toFixed(3)}))`;
}
