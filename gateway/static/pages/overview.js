// The overview of a run: its curves and main metrics, updated live.

import { current, updateQuery } from "../address.js";
import * as api from "../api.js";
import { buttonGroup } from "../components/button_group.js";
import { MetricData } from "../components/metric_data.js";
import { ChartGroup } from "../components/chart_group.js";
import { chartsOf, furtherCharts, namesOf } from "../components/chart_definitions.js";
import { empty, failure } from "../components/placeholders.js";
import { recording } from "../recording.js";
import { h, replace, write } from "../dom.js";
import { duration, exact, number, seconds, whole } from "../format.js";

const POINTS = 600;
/** Number of steps appended to a downsampled curve before it is requested again. */
const MAX_APPENDED = 100;
const RANGES = [
  ["200", "last 200"],
  ["1000", "last 1,000"],
  ["all", "all"],
];

/** Draw the page; `signal` ends it. */
export async function overviewPage({ frame, run, element, query, signal }) {
  const overview = new Overview(frame, run, signal);
  overview.choose(query.get("range") ?? "all", query);
  replace(element, overview.element);
  await overview.read();
}

class Overview {
  constructor(frame, run, signal) {
    this.frame = frame;
    this.run = run;
    this.signal = signal;
    this.data = new MetricData();
    this.marks = [];
    this.charts = chartsOf(frame.definitions, frame.detail);
    if (recording) this.charts.push(...furtherCharts(frame.definitions, frame.detail.metric_names, this.charts));
    this.curves = new ChartGroup(signal, (start, end) => this.zoom(start, end));
    this.cards = this.charts.map((chart) => this.curves.add(chart));
    this.ranges = buttonGroup("Range of steps", RANGES, "all", (range) => this.pick(range));
    this.summary = h("span", { class: "muted small" });
    this.back = h("button", { class: "button", type: "button", hidden: true, onclick: () => this.zoom(null) }, "All steps");
    this.tiles = h("dl", { class: "tiles" });
    this.status = h("div", {});
    this.status.hidden = true;
    this.element = h(
      "div",
      {},
      this.tiles,
      h("div", { class: "page-head" }, h("h2", {}, "Overview"), this.summary, h("div", { class: "end" }, this.back, this.ranges)),
      this.status,
      this.curves.element,
    );
    this.drawTiles();
    this.listen();
  }

  listen() {
    const { events } = this.frame;
    const { signal } = this;
    events.on("step", ({ step, metrics }) => this.stepped(step, metrics), signal);
    events.on("alert", (alert) => this.mark({ step: alert.step, tone: alert.action === "warn" ? "warn" : "bad" }), signal);
    events.on("change", (change) => this.mark({ step: change.step, tone: "accent", dash: "dash" }), signal);
    events.on("progress", () => this.drawTiles(), signal);
    events.addEventListener("recent-steps", () => this.drawTiles(), { signal });
  }

  /** Set the range from the address. */
  choose(range, query = null) {
    this.range = RANGES.some(([name]) => name === range) ? range : "all";
    this.start = Number(query?.get("start")) || null;
    this.end = Number(query?.get("end")) || null;
    this.ranges.set(this.start ? null : this.range);
    this.back.hidden = !this.start;
  }

  pick(range) {
    this.choose(range);
    updateQuery({ range, start: null, end: null });
    this.read();
  }

  zoom(start, end) {
    if (start !== null && end - start < 2) return this.show();
    if (start === null && !this.start) return;
    updateQuery({ start, end });
    this.choose(this.range, current().query);
    this.read();
  }

  bounds() {
    if (this.start) return { first: this.start, last: this.end };
    const last = this.frame.detail.step;
    return this.range === "all" ? {} : { first: Math.max(1, last - Number(this.range) + 1) };
  }

  async read() {
    this.reading?.abort();
    const reading = new AbortController();
    this.reading = reading;
    this.signal.addEventListener("abort", () => reading.abort(), { once: true });
    try {
      const [answer] = await Promise.all([
        api.metrics(this.run, this.frame.known(namesOf(this.charts)), this.bounds(), POINTS, reading.signal),
        this.readMarks(reading.signal),
      ]);
      this.data.load(answer);
      this.drawTiles();
      this.status.hidden = this.data.last > 0;
      const waits = "Curves appear here after the first committed step.";
      if (!this.data.last) replace(this.status, h("div", { class: "panel", style: { "margin-bottom": "12px" } }, empty("No steps yet", waits)));
      this.show();
    } catch (problem) {
      if (problem.name === "AbortError") return;
      if (!(problem.status >= 0)) throw problem;
      this.status.hidden = false;
      replace(this.status, failure(problem, () => this.read()));
    }
  }

  async readMarks(signal) {
    const [guards, settings] = await Promise.all([
      this.frame.detail.alerts ? api.guards(this.run, signal) : { alerts: [] },
      api.settings(this.run, signal).catch(() => ({ changes: [] })),
    ]);
    this.marks = [
      ...guards.alerts.map((alert) => ({ step: alert.step, tone: alert.action === "warn" ? "warn" : "bad" })),
      ...settings.changes.map((change) => ({ step: change.step, tone: "accent", dash: "dash" })),
    ];
  }

  mark(mark) {
    this.marks.push(mark);
    this.show();
  }

  stepped(step, metrics) {
    this.drawTiles(metrics);
    if (this.start) return;
    const wanted = Object.fromEntries(namesOf(this.charts).map((name) => [name, metrics[name] ?? null]));
    const known = Object.fromEntries(Object.entries(wanted).filter(([name]) => metrics[name] !== undefined || this.data.curves[name]));
    if (!this.data.append(step, known)) return;
    if (this.data.bucket > 1 && this.data.appended >= MAX_APPENDED) return void this.read();
    if (this.range !== "all") this.data.dropBefore(step - Number(this.range) + 1);
    else if (this.data.bucket === 1 && step - this.data.first >= 2 * POINTS) return void this.read();
    this.status.hidden = true;
    this.show();
  }

  show() {
    const first = this.start ?? Math.max(1, this.data.first);
    const last = this.start ? this.end : Math.max(this.data.last, first + 1);
    const marks = this.marks.filter(({ step }) => step >= first && step <= last);
    this.cards.forEach((card, at) => card.set({ series: this.charts[at].lines(this.data), range: [first, last], marks }));
    const downsampled = this.data.bucket > 1 ? `, up to ${whole(this.data.bucket)} steps per point` : "";
    const kinds = [marks.some(({ tone }) => tone !== "accent") ? "dotted lines: alerts" : "", marks.some(({ tone }) => tone === "accent") ? "dashed lines: changed settings" : ""];
    const legend = kinds.filter(Boolean).join("; ");
    write(this.summary, this.data.last ? `steps ${whole(first)} to ${whole(last)}${downsampled}${legend ? ` · ${legend}` : ""}` : "");
  }

  drawTiles(metrics) {
    if (metrics) this.newest = metrics;
    const { detail, head } = this.frame;
    const beta = this.newest?.kl_coefficient ?? this.data.curves.kl_coefficient?.mean.at(-1);
    const tiles = [
      ["Throughput", number(head.tokensPerSecond), " tokens/s"],
      ["Step time", seconds(head.secondsPerStep), ""],
      ["Time left", duration(head.secondsLeft), ""],
      ["KL coefficient", beta === undefined ? "–" : exact(beta), ""],
      ["Alerts", whole(detail.alerts), ""],
      ["Failed trajectories", whole(detail.failed_trajectories), " responses"],
    ];
    if (!this.values) {
      this.values = tiles.map(() => h("dd", {}));
      replace(this.tiles, tiles.map(([label], at) => h("div", { class: "tile" }, h("dt", {}, label), this.values[at])));
    }
    tiles.forEach(([, value, unit], at) => {
      if (this.values[at].dataset.text === value) return;
      this.values[at].dataset.text = value;
      replace(this.values[at], value, unit && value !== "–" ? h("small", {}, unit) : null);
    });
  }
}
