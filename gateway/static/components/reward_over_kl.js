// Reward over KL: one curve for each run or setting, smoothed over steps. It shows what a unit of KL buys.

import * as charts from "../charts.js";
import { h } from "../dom.js";
import { number } from "../format.js";

/** Part of the steps that each point averages. */
const WINDOW = 0.1;

/** A figure with one curve for each entry of `series`: {label, colour}. */
export class RewardOverKl {
  constructor(series, signal) {
    this.series = series;
    this.plot = h("div", { class: "plot" });
    this.key = h("div", { class: "curve-key", "aria-hidden": "true" }, series.map(({ label, colour, dashed }) => h("span", { class: dashed ? "dashed" : null, style: { "--key": `var(--${colour})` } }, label)));
    this.element = h(
      "figure",
      { class: "curve panel", tabindex: 0, role: "group", "aria-label": "Reward over KL" },
      h("div", { class: "curve-head" }, h("h3", {}, "Reward over KL", h("small", {}, " nats per response, smoothed"))),
      this.key,
      this.plot,
    );
    this.sized = new ResizeObserver(() => this.draw());
    this.sized.observe(this.plot);
    window.addEventListener("quartet:theme", () => this.draw(), { signal });
    signal.addEventListener("abort", () => {
      this.sized.disconnect();
      charts.release(this.plot);
    });
  }

  /** Set the lines of reward and KL, in the order of the series; null for one without data. */
  set(rewards, kls) {
    this.lines = this.series.map((_, at) => overKl(rewards[at], kls[at]));
    const ends = this.lines.map((line, at) => (line ? `${this.series[at].label} ${number(line.y.at(-1))} at KL ${number(line.x.at(-1))}` : null));
    this.element.setAttribute("aria-label", `Reward over KL: ${ends.filter(Boolean).join(", ") || "no data"}`);
    this.draw();
  }

  draw() {
    if (!this.lines) return;
    const traces = this.lines.flatMap((line, at) => (line ? charts.lineTraces({ ...this.series[at], ...line }) : []));
    const layout = charts.lineLayout({ zoom: false });
    layout.xaxis = { ...layout.xaxis, tickformat: "", rangemode: "tozero" };
    charts.draw(this.plot, traces, layout).catch(() => null);
  }
}

function overKl(reward, kl) {
  if (!reward || !kl) return null;
  const indexOfStep = new Map(kl.x.map((step, at) => [step, at]));
  const points = reward.x
    .map((step, at) => [kl.y[indexOfStep.get(step)], reward.y[at]])
    .filter(([x, y]) => x !== undefined && x !== null && y !== null);
  if (!points.length) return null;
  const half = Math.floor((points.length * WINDOW) / 2);
  const mean = (at, column) => {
    const near = points.slice(Math.max(0, at - half), at + half + 1);
    return near.reduce((sum, point) => sum + point[column], 0) / near.length;
  };
  return { x: points.map((_, at) => mean(at, 0)), y: points.map((_, at) => mean(at, 1)), low: null, high: null };
}
