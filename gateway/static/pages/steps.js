// The steps of a run, and the timeline and metrics of one step.

import { updateQuery } from "../address.js";
import * as api from "../api.js";
import { colourOf, gantt, ganttKeys } from "../components/gantt.js";
import { empty, failure, fillWith } from "../components/placeholders.js";
import { facts, table } from "../components/table.js";
import { h, replace } from "../dom.js";
import { moment, number, percent, seconds, whole, words } from "../format.js";
import { icon } from "../icons.js";
import { criticalPath, lengthOf, shares } from "../timeline_analysis.js";

const PAGE = 50;
/** Fraction of a step below which a part of the critical path is not listed. */
const MIN_LISTED_FRACTION = 0.005;

/** Draw the page; `signal` ends it. */
export async function stepsPage({ frame, run, element, query, signal }) {
  const page = new StepsPage(frame, run, signal);
  replace(element, page.element);
  page.chosen = Number(query.get("step")) || null;
  page.follows = page.chosen === null;
  await page.readList();
  await page.open(page.chosen ?? page.steps[0]?.step ?? null);
}

class StepsPage {
  constructor(frame, run, signal) {
    this.frame = frame;
    this.run = run;
    this.signal = signal;
    this.steps = [];
    this.list = h("div", { class: "panel" });
    this.more = h("button", { class: "button", type: "button", hidden: true, onclick: () => this.readMore() }, "Earlier steps");
    this.detail = h("div", { class: "stack" });
    this.newestButton = h("button", { class: "button", type: "button", hidden: true, onclick: () => this.toNewest() }, icon("higher"), "Newest step");
    this.element = h(
      "div",
      {},
      h("div", { class: "page-head" }, h("h2", {}, "Steps"), h("div", { class: "end" }, this.jump(), this.newestButton)),
      h("div", { class: "split" }, h("div", { class: "stack" }, this.list, this.more), this.detail),
    );
    frame.events.on("step", ({ step, metrics }) => this.stepped(step, metrics), signal);
    document.addEventListener("keydown", (event) => this.keyed(event), { signal });
    window.addEventListener("resize", () => this.drawGantt(), { signal });
  }

  jump() {
    const field = h("input", { type: "number", min: 1, step: 1, placeholder: "Step", "aria-label": "Go to a step", "data-filter": true, style: { width: "96px" } });
    const go = (event) => {
      event.preventDefault();
      if (Number(field.value) >= 1) this.choose(Number(field.value));
    };
    return h("form", { class: "between", onsubmit: go }, field, h("button", { class: "button", type: "submit" }, "Show"));
  }

  async readList() {
    await fillWith(
      this.list,
      async () => {
        const page = await api.steps(this.run, { limit: PAGE }, this.signal);
        this.steps = page.items;
        this.next = page.next;
        return this.drawn();
      },
      this.signal,
    );
    this.more.hidden = !this.next;
  }

  async readMore() {
    const page = await api.steps(this.run, { limit: PAGE, cursor: this.next }, this.signal);
    this.steps.push(...page.items);
    this.next = page.next;
    this.draw();
  }

  draw() {
    replace(this.list, this.drawn());
    this.more.hidden = !this.next;
  }

  drawn() {
    if (!this.steps.length) return empty("No steps yet", "Steps appear here after they are committed.");
    return table({
      caption: "Steps, newest first",
      rows: this.steps,
      chosen: (row) => row.step === this.chosen,
      onrow: (row) => this.choose(row.step),
      columns: [
        { label: "Step", head: true, cell: (row) => this.link(row.step) },
        { label: "Time", number: true, cell: (row) => seconds(row.seconds) },
        { label: "Reward", number: true, cell: (row) => number(row.reward_mean) },
        { label: "KL", number: true, cell: (row) => number(row.kl_mean) },
        { label: "Tokens", number: true, cell: (row) => whole(row.response_tokens) },
        ...(this.steps.some((row) => row.failed_trajectories) ? [{ label: "Failed trajectories", number: true, cell: (row) => whole(row.failed_trajectories) }] : []),
      ],
    });
  }

  link(step) {
    const follow = (event) => {
      event.preventDefault();
      this.choose(step);
    };
    return h("a", { href: this.frame.address("steps", { step }), onclick: follow, "aria-current": step === this.chosen ? "true" : null }, whole(step));
  }

  choose(step) {
    this.follows = false;
    updateQuery({ step });
    return this.open(step);
  }

  toNewest() {
    this.follows = true;
    updateQuery({ step: null });
    return this.open(this.frame.detail.step);
  }

  async open(step) {
    this.chosen = step;
    this.newestButton.hidden = this.follows || !this.frame.detail.live;
    if (step === null) return replace(this.detail, h("div", { class: "panel" }, empty("Nothing to show", "The timeline of a step appears here.")));
    if (this.steps.length) this.draw();
    this.opening?.abort();
    const opening = new AbortController();
    this.opening = opening;
    this.signal.addEventListener("abort", () => opening.abort(), { once: true });
    try {
      const detail = await api.step(this.run, step, opening.signal);
      if (opening.signal.aborted) return;
      this.shown = detail;
      replace(this.detail, this.stepHead(detail), this.timeline(detail), this.metrics(detail));
      this.drawGantt();
    } catch (problem) {
      if (problem.name === "AbortError") return;
      if (!(problem.status >= 0)) throw problem;
      replace(this.detail, h("div", { class: "panel" }, failure(problem, () => this.open(step))));
    }
  }

  stepHead({ step, started, has_tokens: tokens, metrics }) {
    const move = (by, name, label) =>
      h(
        "button",
        { class: "button bare", type: "button", "aria-label": label, title: label, disabled: step + by < 1 || step + by > this.frame.detail.step, onclick: () => this.choose(step + by) },
        icon(name),
      );
    return h(
      "div",
      { class: "page-head", style: { "margin-bottom": "0" } },
      h("h2", {}, `Step ${whole(step)}`),
      h("span", { class: "muted small" }, [seconds(metrics.seconds), started ? moment(started) : ""].filter(Boolean).join(" · ")),
      h(
        "div",
        { class: "end" },
        move(-1, "left", "Previous step"),
        move(1, "right", "Next step"),
        h("a", { class: "button", href: this.frame.address("trajectories", { step }) }, icon("text"), tokens ? "Trajectories" : "Responses"),
      ),
    );
  }

  timeline({ spans, devices }) {
    if (!spans.length) {
      return h("div", { class: "panel" }, empty("No timeline for this step", "Timelines are recorded if telemetry.timeline is true."));
    }
    this.chart = h("div", { style: { "min-height": "220px" } });
    const length = lengthOf(spans);
    const links = criticalPath(spans).filter((link) => link.end - link.start >= MIN_LISTED_FRACTION * length);
    return h(
      "section",
      { class: "panel padded stack" },
      h("div", { class: "page-head", style: { margin: "0" } }, h("h3", {}, "Timeline"), h("div", { class: "end" }, ganttKeys(spans, devices))),
      this.chart,
      h("h3", {}, "Critical path: the work that determines the duration of the step"),
      h(
        "ol",
        { class: "chain-list" },
        links.map((link) =>
          h(
            "li",
            { style: { "--key": link.span ? colourOf(link.phase) : "transparent" } },
            link.span ? `${link.service}: ${words(link.phase)}` : "no activity",
            h("b", {}, seconds(link.end - link.start)),
            h("span", { class: "muted" }, percent((link.end - link.start) / length)),
          ),
        ),
      ),
      this.shares(spans),
    );
  }

  shares(spans) {
    return table({
      caption: "Time of each service in this step",
      rows: shares(spans),
      columns: [
        { label: "Service", head: true, cell: (row) => row.service },
        { label: "Busy", number: true, cell: (row) => percent(row.share) },
        { label: h("span", { class: "unseen" }, "Busy, as a bar"), cell: (row) => h("div", { class: "bar", "aria-hidden": "true" }, h("i", { style: { width: `${row.share * 100}%` } })) },
        { label: "Time", number: true, cell: (row) => seconds(row.busy) },
        { label: "Not overlapped", number: true, cell: (row) => seconds(row.exclusive) },
        { label: "Calls", number: true, cell: (row) => whole(row.calls) },
        { label: "Phases", cell: (row) => row.phases.map(([phase, time]) => `${words(phase)} ${seconds(time)}`).join(", ") },
      ],
    });
  }

  drawGantt() {
    if (!this.chart?.isConnected || !this.shown?.spans.length) return;
    replace(this.chart, gantt(this.shown.spans, Math.max(320, this.chart.clientWidth), this.shown.devices));
  }

  metrics({ metrics }) {
    const names = Object.keys(metrics).filter((name) => name !== "step");
    const half = Math.ceil(names.length / 2);
    const part = (some) => facts(some.map((name) => [words(name), number(metrics[name])]));
    return h("section", { class: "panel padded stack" }, h("h3", {}, "Metrics"), h("div", { class: "pair" }, part(names.slice(0, half)), part(names.slice(half))));
  }

  stepped(step, metrics) {
    if (this.steps.some((row) => row.step >= step)) return;
    const names = ["seconds", "generate_seconds", "score_seconds", "update_seconds", "reward_mean", "kl_mean", "response_tokens"];
    this.steps.unshift({ step, failed_trajectories: metrics.failed_trajectories ?? 0, ...Object.fromEntries(names.map((name) => [name, metrics[name] ?? null])) });
    if (this.timer) return;
    // Redraw at most once a second, also for runs with fast steps.
    this.timer = setTimeout(() => {
      this.timer = null;
      if (this.signal.aborted) return;
      if (this.follows) this.open(this.steps[0].step);
      else this.draw();
    }, 1000);
  }

  keyed(event) {
    if (event.target.closest("input, textarea, select, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
    const by = { "[": -1, "]": 1 }[event.key];
    const step = this.chosen + by;
    if (by && step >= 1 && step <= this.frame.detail.step) this.choose(step);
  }
}
