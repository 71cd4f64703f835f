// The header of a run's pages: state, progress, time left, and the current phase.

import * as api from "../api.js";
import { h, replace, write } from "../dom.js";
import { ENDLESS_STEPS, ago, duration, number, plural, steps, whole } from "../format.js";
import { icon } from "../icons.js";
import { statePill } from "./state_pill.js";

/** Number of recent steps over which speed is averaged. */
const WINDOW = 30;

export class RunHeader {
  constructor(frame) {
    this.frame = frame;
    this.recentSteps = [];
    this.state = h("span", {});
    this.facts = h("span", { class: "muted small" });
    this.steps = h("span", {});
    this.left = h("span", { class: "muted" });
    this.phase = h("span", {});
    this.scored = h("span", { class: "muted" });
    this.stepMeter = meter("Completed steps");
    this.scoredMeter = meter("Scored responses of the current step", "good");
    this.note = h("p", { class: "run-note" });
    this.element = h(
      "header",
      { class: "run-head" },
      h("div", { class: "run-title" }, h("h1", {}, frame.run), this.state, this.facts),
      frame.controls.element,
      h(
        "div",
        { class: "run-progress" },
        h("div", {}, h("div", { class: "meter-line" }, this.steps, this.left), this.stepMeter),
        h("div", {}, h("div", { class: "meter-line" }, this.phase, this.scored), this.scoredMeter),
      ),
      this.note,
    );
    this.draw();
  }

  /** Read duration and tokens of recent steps, for the time left and the throughput. */
  async readRecentSteps(signal) {
    const last = this.frame.detail.step;
    if (!last) return;
    try {
      const names = ["seconds", this.tokensMetric];
      const answer = await api.metrics(this.frame.run, names, { first: Math.max(1, last - WINDOW + 1) }, WINDOW, signal);
      const { seconds, [this.tokensMetric]: tokens } = answer.curves;
      this.recentSteps = seconds ? seconds.steps.map((_, at) => [seconds.mean[at], tokens?.mean[at] ?? null]) : [];
      this.draw();
      this.frame.events.dispatchEvent(new CustomEvent("recent-steps"));
    } catch (problem) {
      if (!(problem.status >= 0) && problem.name !== "AbortError") throw problem;
    }
  }

  /** Metric with the tokens of a step. */
  get tokensMetric() {
    return this.frame.detail.has_stage ? "tokens" : "response_tokens";
  }

  stepped(step, metrics) {
    if (Number.isFinite(metrics.seconds)) this.recentSteps.push([metrics.seconds, metrics[this.tokensMetric] ?? null]);
    this.recentSteps = this.recentSteps.slice(-WINDOW);
  }

  /** Mean duration of recent steps in seconds; null before the first step. */
  get secondsPerStep() {
    const known = this.recentSteps.map(([seconds]) => seconds).filter((value) => value > 0);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  }

  /** Tokens per second over recent steps; null before the first step. */
  get tokensPerSecond() {
    const known = this.recentSteps.filter(([seconds, tokens]) => seconds > 0 && tokens !== null);
    const spent = known.reduce((sum, [seconds]) => sum + seconds, 0);
    return spent ? known.reduce((sum, [, tokens]) => sum + tokens, 0) / spent : null;
  }

  /** Estimated time until the last step in seconds; null unless the run is training. */
  get secondsLeft() {
    const { detail } = this.frame;
    const perStep = detail.total_steps < ENDLESS_STEPS ? this.secondsPerStep : null;
    return detail.live && detail.state !== "paused" && perStep !== null ? (detail.total_steps - detail.step) * perStep : null;
  }

  draw() {
    const { detail } = this.frame;
    const { progress } = detail;
    if (this.shown !== detail.state) {
      this.shown = detail.state;
      replace(this.state, statePill(detail.state));
    }
    const recoveries = progress?.recoveries ? ` · ${plural(progress.recoveries, "recovery", "recoveries")}` : "";
    write(this.facts, `${detail.estimator} · seed ${detail.seed}${recoveries}`);
    write(this.steps, `step ${steps(detail.step, detail.total_steps)}`);
    const left = this.secondsLeft;
    const rate = this.tokensPerSecond;
    const parts = [rate === null ? "" : `${number(rate)} tokens/s`, left === null ? "" : `${duration(left)} left`];
    write(this.left, parts.filter(Boolean).join(" · "));
    setMeter(this.stepMeter, detail.step, detail.total_steps);
    write(this.phase, progress && detail.live ? `phase: ${progress.phase}` : "not active");
    write(this.scored, progress && detail.live && progress.num_expected ? `${whole(progress.num_scored)} of ${whole(progress.num_expected)} scored` : "");
    setMeter(this.scoredMeter, detail.live ? progress?.num_scored ?? 0 : 0, progress?.num_expected ?? 0);
    this.drawNote(progress);
  }

  drawNote(progress) {
    const text = progress?.error || progress?.notes?.at(-1) || `last step ${ago(this.frame.detail.changed)}`;
    if (text === this.shownNote) return;
    this.shownNote = text;
    this.note.className = progress?.error ? "run-note notice bad" : "run-note";
    this.note.title = text;
    replace(this.note, progress?.error ? icon("cross") : null, h("span", {}, text));
  }
}

function meter(label, tone) {
  const bar = h("div", {});
  return h("div", { class: "meter", role: "progressbar", "aria-label": label, "aria-valuemin": 0, "data-tone": tone }, bar);
}

function setMeter(element, value, max) {
  element.setAttribute("aria-valuemax", String(max || 1));
  element.setAttribute("aria-valuenow", String(value));
  element.firstElementChild.style.transform = `scaleX(${max ? Math.min(1, value / max) : 0})`;
}
