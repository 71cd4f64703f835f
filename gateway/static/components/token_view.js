// A response token by token: coloured text, a bar chart, and the values of the selected token.

import { h, replace, s } from "../dom.js";
import { number, whole } from "../format.js";
import { MEASURES, scaleOf } from "../token_colours.js";

const NUMBERS = [
  ["Log-prob", (token) => token.log_prob],
  ["Reference", (token) => token.reference_log_prob],
  ["KL", (token) => token.kl],
  ["Value", (token) => token.value],
  ["Advantage", (token) => token.advantage],
  ["Return", (token) => token.return],
];

/** Return a token's text with visible white space. */
export function visible(text) {
  return text === "" ? "∅" : text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}

/** Show the tokens of a response; `measure` is a key of MEASURES. */
export class TokenView {
  constructor(tokens, measure) {
    this.tokens = tokens;
    this.at = null;
    this.facts = h("div", { class: "token-facts" });
    this.legend = h("div", { class: "legend" });
    this.strip = s("svg", { class: "strip", preserveAspectRatio: "none", "aria-hidden": "true" });
    this.text = h("div", { class: "tokens", role: "group", "aria-label": "The response, token by token; use the arrow keys to move between tokens" });
    this.spans = tokens.map((token, at) => this.span(token, at));
    replace(this.text, this.spans);
    this.spans[0]?.setAttribute("tabindex", "0");
    this.strip.addEventListener("pointermove", (event) => {
      const box = this.strip.getBoundingClientRect();
      this.pick(Math.min(tokens.length - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * tokens.length))));
    });
    this.strip.addEventListener("pointerleave", () => this.pick(null));
    this.colourBy(measure);
    this.pick(null);
  }

  span(token, at) {
    // A line break gets a visible symbol and also breaks the line.
    const text = token.text === "" ? "∅" : token.text.replace(/\n/g, "↵\n");
    return h(
      "span",
      {
        class: token.observation ? "token observation" : "token",
        tabindex: -1,
        role: "img",
        onpointerenter: () => this.pick(at),
        onpointerleave: () => this.pick(null),
        onfocus: () => this.pick(at),
        onkeydown: (event) => this.keyed(event, at),
      },
      text,
    );
  }

  keyed(event, at) {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: this.tokens.length - 1 }[event.key];
    if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    const next = this.spans[Math.max(0, Math.min(this.tokens.length - 1, to))];
    this.spans[at].setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  }

  colourBy(measure) {
    this.measure = measure;
    const { of, label, meaning } = MEASURES[measure];
    const scale = scaleOf(this.tokens, measure);
    this.spans.forEach((span, at) => {
      const value = of(this.tokens[at]);
      span.style.backgroundColor = Number.isFinite(value) ? scale.colour(value) : "";
      const what = this.tokens[at].observation ? "observation" : `${label} ${number(value)}`;
      span.setAttribute("aria-label", `${visible(this.tokens[at].text)}: ${what}`);
    });
    replace(
      this.legend,
      h("span", {}, scale.low),
      h("div", { style: { background: scale.gradient }, role: "img", "aria-label": `Colours from ${scale.low} to ${scale.high}` }),
      h("span", {}, `${scale.high} · ${label}, ${meaning}`),
      this.tokens.some((token) => token.observation) ? h("span", { class: "observation" }, "observation of the environment, not trained on") : null,
    );
    this.drawStrip(scale, of);
  }

  drawStrip(scale, of) {
    const count = this.tokens.length;
    const middle = scale.signed ? 40 : 4;
    const extent = scale.signed ? 36 : 76;
    this.strip.setAttribute("viewBox", `0 0 ${count} 80`);
    this.bars = this.tokens.map((token, at) => {
      const value = of(token);
      const size = Number.isFinite(value) ? scale.position(value) * extent : 0;
      const height = Math.max(0.8, Math.abs(size));
      const bar = s("rect", { x: at + 0.1, width: 0.8, y: scale.signed ? (size > 0 ? middle - height : middle) : middle, height });
      bar.style.fill = scale.signed && value < 0 ? "var(--blue)" : "var(--orange)";
      return bar;
    });
    const zero = s("line", { class: "zero", x1: 0, x2: count, y1: middle, y2: middle, "vector-effect": "non-scaling-stroke" });
    replace(this.strip, this.bars, zero);
  }

  /** Show the values of a token; null shows a hint. */
  pick(at) {
    for (const list of [this.spans, this.bars]) {
      list[this.at]?.classList.remove("picked");
      if (at !== null) list[at]?.classList.add("picked");
    }
    this.at = at;
    if (at === null) return replace(this.facts, h("span", { class: "muted" }, "Point at a token to see its values. The table below lists all tokens."));
    const token = this.tokens[at];
    replace(
      this.facts,
      h("span", {}, h("span", { class: "muted" }, `Token ${whole(at + 1)} of ${whole(this.tokens.length)} `), h("b", { class: "mono" }, visible(token.text)), h("span", { class: "muted" }, ` id ${token.id}`)),
      token.observation ? h("span", { class: "muted" }, "observation of the environment, not trained on") : NUMBERS.map(([label, of]) => h("span", {}, h("span", { class: "muted" }, `${label} `), h("b", {}, number(of(token))))),
    );
  }
}

/** Columns of the token table. */
export const tokenColumns = [
  { label: "#", number: true, cell: ({ at }) => String(at + 1) },
  { label: "Token", head: true, cell: ({ token }) => h("code", {}, visible(token.text)) },
  { label: "Id", number: true, cell: ({ token }) => String(token.id) },
  ...NUMBERS.map(([label, of]) => ({ label, number: true, cell: ({ token }) => number(of(token)) })),
];
