// Comparison of several runs: their curves, and the differences of their configs.

import { updateQuery, to } from "../address.js";
import * as api from "../api.js";
import { colourName } from "../charts.js";
import { MetricData } from "../components/metric_data.js";
import { ChartGroup } from "../components/chart_group.js";
import { chartsOf, namesOf } from "../components/chart_definitions.js";
import { RewardOverKl } from "../components/reward_over_kl.js";
import { meanLine, settingsOf } from "../components/run_settings.js";
import { statePill } from "../components/state_pill.js";
import { empty, failure, loading } from "../components/placeholders.js";
import { table } from "../components/table.js";
import { leaves, shown } from "../components/config_tree.js";
import { h, replace } from "../dom.js";
import { number, steps, whole } from "../format.js";

const POINTS = 600;
/** Number of distinct colours: of the runs, or of the settings, of which as many again are dashed. */
const NUM_COLOURS = 6;
const MAX_GROUPED_RUNS = 40;
/** Runs in one request for curves. */
const BATCH = 10;

/** Draw the page; `signal` ends it. `runs` in the query names the runs; `group=setting` joins seeds, by default of all runs. */
export async function comparePage({ main, where, query, signal }) {
  document.title = "Compare · Quartet";
  replace(where, h("a", { href: "#/runs" }, "Runs"), h("span", { "aria-hidden": "true" }, "/"), h("span", {}, "compare"));
  const page = new ComparePage(main, signal, query);
  await page.read();
}

class ComparePage {
  constructor(main, signal, query) {
    Object.assign(this, { main, signal });
    this.chosen = (query.get("runs") ?? "").split(",").filter(Boolean);
    this.grouped = query.get("group") === "setting";
    this.first = Number(query.get("start")) || null;
    this.last = Number(query.get("end")) || null;
  }

  async findRuns() {
    if (!this.grouped) return this.chosen.slice(0, NUM_COLOURS);
    const limit = MAX_GROUPED_RUNS + 1;
    const names = this.chosen.length ? this.chosen : api.itemsOf(await api.runs({ limit }, this.signal)).map((run) => run.name);
    this.cut = names.length > MAX_GROUPED_RUNS;
    return names.slice(0, MAX_GROUPED_RUNS);
  }

  async read() {
    replace(this.main, h("h1", {}, "Compare"), loading("50vh"));
    try {
      this.names = await this.findRuns();
      if (this.names.length < 2) {
        return replace(this.main, h("h1", {}, "Compare"), empty("Select at least two runs", h("a", { href: "#/runs" }, "in the list of runs"), "."));
      }
      const [details, configs, definitions] = await Promise.all([
        Promise.all(this.names.map((name) => api.run(name, this.signal))),
        Promise.all(this.names.map((name) => api.config(name, this.signal))),
        api.metricDefinitions(this.signal),
      ]);
      this.details = details;
      this.configs = configs.map((item) => item.config);
      const groups = this.grouped ? settingsOf(this.configs) : this.names.map((name, at) => ({ label: name, runs: [at] }));
      this.hidden = Math.max(0, groups.length - 2 * NUM_COLOURS);
      this.groups = groups.slice(0, 2 * NUM_COLOURS).map((group, at) => ({ ...group, colour: colourName(at), dashed: at >= NUM_COLOURS }));
      this.base = chartsOf(definitions, {
        has_critic: details.some((run) => run.has_critic),
        has_scores: details.some((run) => run.has_scores),
        has_teacher: details.some((run) => run.has_teacher),
        has_stage: details.every((run) => run.has_stage),
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
    const batches = [];
    for (let at = 0; at < this.names.length; at += BATCH) batches.push(this.names.slice(at, at + BATCH));
    const answers = [];
    for (const names of batches) answers.push(...(await api.metricsOfRuns(names, namesOf(this.base), range, POINTS, this.signal)));
    const byRun = new Map(answers.map((answer) => [answer.run, answer]));
    this.data = this.names.map((name) => {
      const data = new MetricData();
      data.load(byRun.get(name));
      return data;
    });
    const first = this.first ?? Math.max(1, Math.min(...answers.map((answer) => answer.first || 1)));
    const last = this.last ?? Math.max(first + 1, ...answers.map((answer) => answer.last));
    for (const { card, chart, at } of this.cards) {
      card.set({ range: [first, last], marks: [], series: this.linesOf((data) => chart.lines(data)[at]) });
    }
    this.rewardOverKl?.set(this.linesOf((data) => data.line("reward_mean")), this.linesOf((data) => data.line("kl_mean")));
    this.back.hidden = !this.first;
  }

  /** Return a line for each group: that of its run without its band, because bands of runs overlap, or the mean over its runs. */
  linesOf(line) {
    return this.groups.map(({ runs }) => (this.grouped ? meanLine(runs.map((at) => line(this.data[at]))) : strip(line(this.data[runs[0]]))));
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
    if (this.details.some((run) => run.has_scores)) {
      this.rewardOverKl = new RewardOverKl(this.groups, this.signal);
      this.curves.element.append(this.rewardOverKl.element);
    }
    const runs = this.chosen.join(",");
    const other = this.grouped
      ? h("a", { class: "button", href: to(["compare"], { runs: this.names.slice(0, NUM_COLOURS).join(",") }) }, "By run")
      : h("a", { class: "button", href: to(["compare"], { runs, group: "setting" }) }, "By setting");
    replace(
      this.main,
      h("div", { class: "page-head" }, h("h1", {}, `Compare ${this.names.length} runs`), h("div", { class: "end" }, this.back, other)),
      this.grouped ? h("p", { class: "muted small" }, this.about()) : null,
      h("div", { class: "stack" }, this.summary(), h("h2", { class: "unseen" }, "Curves"), this.curves.element, h("h2", { class: "unseen" }, "Settings"), this.differences()),
    );
  }

  about() {
    const hidden = this.hidden ? ` The first ${this.groups.length} settings are shown, ${this.hidden} are not.` : "";
    const cut = this.cut ? ` Only the first ${MAX_GROUPED_RUNS} runs are read.` : "";
    return `Each curve is the mean over the runs of a setting; the band is their lowest and highest value.${hidden}${cut}`;
  }

  spec(chart, series, several) {
    return {
      ...chart,
      title: several ? `${chart.title}: ${series.label}` : chart.title,
      main: undefined,
      series: this.groups.map(({ label, colour, dashed }) => ({ label, colour, dashed })),
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
          { label: "Run", head: true, cell: (run) => this.link(run) },
          { label: "State", cell: (run) => statePill(run.state) },
          { label: "Step", number: true, cell: (run) => steps(run.step, run.total_steps) },
          { label: "Reward", number: true, cell: (run) => number(run.reward_mean) },
          { label: "KL", number: true, cell: (run) => number(run.kl_mean) },
          { label: "Estimator", cell: (run) => run.estimator },
          { label: "Seed", number: true, cell: (run) => String(run.seed) },
          { label: "Alerts", number: true, cell: (run) => whole(run.alerts) },
        ],
      }),
    );
  }

  /** Return the link to a run, with the key of its curve. */
  link(run) {
    const link = h("a", { href: to(["runs", run.name, "overview"]) }, run.name);
    const group = this.groups.find(({ runs }) => runs.includes(this.details.indexOf(run)));
    if (!group) return link;
    return h("span", { class: "curve-key" }, h("span", { class: group.dashed ? "dashed" : null, style: { "--key": `var(--${group.colour})` } }, link));
  }

  differences() {
    const maps = this.groups.map(({ runs }) => new Map(leaves(this.configs[runs[0]])));
    const own = this.grouped ? ["run.name", "run.seed"] : ["run.name"];
    const paths = [...new Set(maps.flatMap((map) => [...map.keys()]))].filter((path) => !own.includes(path));
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
              ...this.groups.map(({ label }, at) => ({ label, cell: (path) => h("code", {}, shown(maps[at].get(path))) })),
            ],
          })
        : empty("No differences", `These runs have the same settings except for their names${this.grouped ? " and seeds" : ""}.`),
    );
  }
}

/** Remove the band: the bands of several runs would overlap. */
function strip(line) {
  return line ? { ...line, low: null, high: null } : null;
}
