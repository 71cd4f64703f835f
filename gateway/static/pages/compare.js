// Comparison of several runs: their curves, and the differences of their configs.

import { updateQuery, to } from "../address.js";
import * as api from "../api.js";
import { colourName } from "../charts.js";
import { MetricData } from "../components/metric_data.js";
import { ChartGroup } from "../components/chart_group.js";
import { chartsOf, namesOf } from "../components/chart_definitions.js";
import { statePill } from "../components/state_pill.js";
import { empty, failure, loading } from "../components/placeholders.js";
import { table } from "../components/table.js";
import { leaves, shown } from "../components/config_tree.js";
import { h, replace } from "../dom.js";
import { number, whole } from "../format.js";

const POINTS = 600;
/** Number of distinct colours. */
const MAX_RUNS = 6;

/** Draw the page; `signal` ends it. */
export async function comparePage({ main, where, query, signal }) {
  document.title = "Compare · Quartet";
  replace(where, h("a", { href: "#/runs" }, "Runs"), h("span", { "aria-hidden": "true" }, "/"), h("span", {}, "compare"));
  const names = (query.get("runs") ?? "").split(",").filter(Boolean);
  if (names.length < 2) {
    return replace(main, h("h1", {}, "Compare"), empty("Select at least two runs", h("a", { href: "#/runs" }, "in the list of runs"), "."));
  }
  const page = new ComparePage(main, names.slice(0, MAX_RUNS), signal, query);
  await page.read();
}

class ComparePage {
  constructor(main, names, signal, query) {
    Object.assign(this, { main, names, signal });
    this.first = Number(query.get("start")) || null;
    this.last = Number(query.get("end")) || null;
  }

  async read() {
    replace(this.main, h("h1", {}, "Compare"), loading("50vh"));
    try {
      const [details, configs] = await Promise.all([
        Promise.all(this.names.map((name) => api.run(name, this.signal))),
        Promise.all(this.names.map((name) => api.config(name, this.signal))),
      ]);
      this.details = details;
      this.configs = configs.map((item) => item.config);
      this.base = chartsOf({
        has_critic: details.some((run) => run.has_critic),
        has_scores: details.some((run) => run.has_scores),
        has_teacher: details.some((run) => run.has_teacher),
        kl_target: null,
      });
      this.draw();
      await this.readCurves();
    } catch (problem) {
      if (problem.name === "AbortError") return;
      if (!(problem.status >= 0)) throw problem;
      replace(this.main, h("h1", {}, "Compare"), failure(problem, () => this.read()));
    }
  }

  async readCurves() {
    const range = this.first ? { first: this.first, last: this.last } : {};
    const answers = await api.metricsOfRuns(this.names, namesOf(this.base), range, POINTS, this.signal);
    this.data = answers.map((answer) => {
      const data = new MetricData();
      data.load(answer);
      return data;
    });
    const first = this.first ?? Math.max(1, Math.min(...answers.map((answer) => answer.first || 1)));
    const last = this.last ?? Math.max(first + 1, ...answers.map((answer) => answer.last));
    for (const { card, chart, at } of this.cards) {
      card.set({ range: [first, last], marks: [], series: this.data.map((data) => strip(chart.lines(data)[at])) });
    }
    this.back.hidden = !this.first;
  }

  draw() {
    this.curves = new ChartGroup(this.signal, (start, end) => this.zoom(start, end));
    this.cards = this.base.flatMap((chart) =>
      chart.series
        .map((series, at) => ({ series, at }))
        .filter(({ series }) => !series.unlisted && !series.dashed)
        .map(({ series, at }) => ({ chart, at, card: this.curves.add(this.spec(chart, series, chart.series.filter((one) => !one.unlisted).length > 1)) })),
    );
    this.back = h("button", { class: "button", type: "button", hidden: true, onclick: () => this.zoom(null) }, "All steps");
    replace(
      this.main,
      h("div", { class: "page-head" }, h("h1", {}, `Compare ${this.names.length} runs`), h("div", { class: "end" }, this.back)),
      h("div", { class: "stack" }, this.summary(), h("h2", { class: "unseen" }, "Curves"), this.curves.element, h("h2", { class: "unseen" }, "Settings"), this.differences()),
    );
  }

  spec(chart, series, several) {
    return {
      ...chart,
      title: several ? `${chart.title}: ${series.label}` : chart.title,
      main: undefined,
      series: this.names.map((name, at) => ({ label: name, colour: colourName(at) })),
    };
  }

  zoom(start, end) {
    if (start === null && !this.first) return;
    [this.first, this.last] = start === null || end - start < 2 ? [null, null] : [start, end];
    updateQuery({ start: this.first, end: this.last });
    this.readCurves().catch((problem) => {
      if (problem.name !== "AbortError") replace(this.main, failure(problem, () => this.read()));
    });
  }

  summary() {
    return h(
      "section",
      { class: "panel" },
      table({
        caption: "The runs",
        rows: this.details,
        columns: [
          { label: "Run", head: true, cell: (run) => h("span", { class: "curve-key" }, h("span", { style: { "--key": `var(--${colourName(this.details.indexOf(run))})` } }, h("a", { href: to(["runs", run.name, "overview"]) }, run.name))) },
          { label: "State", cell: (run) => statePill(run.state) },
          { label: "Step", number: true, cell: (run) => `${whole(run.step)} of ${whole(run.total_steps)}` },
          { label: "Reward", number: true, cell: (run) => number(run.reward_mean) },
          { label: "KL", number: true, cell: (run) => number(run.kl_mean) },
          { label: "Estimator", cell: (run) => run.estimator },
          { label: "Seed", number: true, cell: (run) => String(run.seed) },
          { label: "Alerts", number: true, cell: (run) => whole(run.alerts) },
        ],
      }),
    );
  }

  differences() {
    const maps = this.configs.map((config) => new Map(leaves(config)));
    const paths = [...new Set(maps.flatMap((map) => [...map.keys()]))].filter((path) => path !== "run.name");
    const rows = paths.filter((path) => new Set(maps.map((map) => shown(map.get(path)))).size > 1).sort();
    return h(
      "section",
      { class: "panel" },
      h("h3", {}, "Config differences"),
      rows.length
        ? table({
            caption: "Different settings",
            rows,
            columns: [
              { label: "Setting", head: true, cell: (path) => h("code", {}, path) },
              ...this.names.map((name, at) => ({ label: name, cell: (path) => h("code", {}, shown(maps[at].get(path))) })),
            ],
          })
        : empty("No differences", "These runs have the same settings except for their names."),
    );
  }
}

/** Remove the band: the bands of several runs would overlap. */
function strip(line) {
  return line ? { ...line, low: null, high: null } : null;
}
