// Evaluations: their mean metrics over the steps, and two evaluations side by side, prompt by prompt.

import { updateQuery } from "../address.js";
import * as api from "../api.js";
import { buttonGroup } from "../components/button_group.js";
import { chartsBy, definitionsOf, formatOf } from "../components/chart_definitions.js";
import { ChartGroup } from "../components/chart_group.js";
import { empty, failure, fillWith, loading } from "../components/placeholders.js";
import { table } from "../components/table.js";
import { freshId, h, replace } from "../dom.js";
import { number, signed, whole, words } from "../format.js";

const ROWS = 40;

/** Draw the page; `signal` ends it. */
export async function evaluationsPage({ frame, run, element, query, signal }) {
  const page = new EvaluationsPage(frame, run, signal, query);
  replace(element, page.element);
  await page.read();
}

class EvaluationsPage {
  constructor(frame, run, signal, query) {
    Object.assign(this, { frame, run, signal });
    this.wanted = { left: query.get("left"), right: query.get("right"), set: query.get("set") ?? "", kind: query.get("kind") ?? "greedy", show: query.get("show") ?? "all" };
    this.body = h("div", { class: "stack" }, loading());
    this.element = h("div", {}, h("div", { class: "page-head" }, h("h2", {}, "Evaluations")), this.body);
    frame.events.on("evaluation", () => this.read(), signal);
  }

  async read() {
    await fillWith(
      this.body,
      async () => {
        this.evaluations = await api.evaluations(this.run, this.signal);
        return this.evaluations.length ? this.drawn() : h("div", { class: "panel" }, nothing());
      },
      this.signal,
      true,
    );
    if (this.evaluations?.length) await this.readPair();
  }

  drawn() {
    this.pair = h("div", { class: "panel" });
    return [this.charts(), this.summaries(), this.chooser(), this.pair];
  }

  charts() {
    const curves = new ChartGroup(this.signal, null);
    curves.element.classList.add("small");
    const steps = this.evaluations.map((item) => item.step);
    const range = [Math.min(...steps), Math.max(...steps, Math.min(...steps) + 1)];
    const names = this.names().filter((name) => this.evaluations.some((item) => Number.isFinite(item.metrics[name])));
    for (const chart of chartsBy(definitionsOf(this.frame.definitions, names))) {
      const card = curves.add(chart);
      card.set({ range, marks: [], series: chart.names.map((name) => ({ x: steps, y: this.evaluations.map((item) => item.metrics[name] ?? null) })) });
    }
    return curves.element;
  }

  /** Names of the metrics, those of evaluation sets included. */
  names() {
    return [...new Set(this.evaluations.flatMap((item) => Object.keys(item.metrics)))].filter((name) => name !== "step");
  }

  summaries() {
    const names = this.names();
    return h(
      "section",
      { class: "panel" },
      table({
        caption: "Evaluations, newest first",
        short: true,
        rows: [...this.evaluations].reverse(),
        columns: [
          { label: "Step", head: true, cell: (row) => (row.step ? whole(row.step) : "0 (initial policy)") },
          { label: "Policy version", number: true, cell: (row) => (Number.isFinite(row.policy_version) ? whole(row.policy_version) : "–") },
          ...names.map((name) => ({ label: titleOf(name), number: true, cell: (row) => this.formatOf(name)(row.metrics[name]) })),
        ],
      }),
    );
  }

  formatOf(name) {
    const definition = this.frame.definitions.find((each) => each.name === name) ?? definitionsOf(this.frame.definitions, [name])[0];
    return formatOf(definition?.unit ?? "").format ?? number;
  }

  chooser() {
    const steps = this.evaluations.map((item) => item.step);
    const newest = steps.at(-1);
    this.left = known(steps, this.wanted.left, steps[0]);
    this.right = known(steps, this.wanted.right, newest);
    const pick = (label, side) => {
      const id = freshId(side);
      const list = h(
        "select",
        { id, onchange: () => this.choose(side, Number(list.value)) },
        steps.map((step) => h("option", { value: step, selected: step === this[side] }, step ? `step ${whole(step)}` : "step 0 (initial policy)")),
      );
      return h("div", { class: "field" }, h("label", { for: id }, label), list);
    };
    const sets = [...new Set(this.evaluations.flatMap((item) => item.sets))];
    if (this.names().includes("eval_tokens_greedy")) sets.unshift("");
    this.set = sets.includes(this.wanted.set) ? this.wanted.set : (sets[0] ?? "");
    const kinds = this.set ? null : buttonGroup("Responses", [["greedy", "greedy"], ["sampled", "sampled"]], this.wanted.kind, (kind) => this.filter({ kind }));
    const filters = [["all", "all"], ["better", "right better"], ["worse", "right worse"], ["different", "texts differ"]];
    const which = buttonGroup("Prompts", filters, this.wanted.show, (show) => this.filter({ show }));
    this.search = h("input", { type: "search", placeholder: "Text in prompt or response", "aria-label": "Text in prompt or response", "data-filter": true, oninput: () => this.drawPair() });
    return h("section", { class: "panel filters", "aria-label": "Two evaluations side by side" }, this.setList(sets), pick("Left", "left"), pick("Right", "right"), kinds, which, this.search);
  }

  /** List of the prompts to show: those of validation, or those of an evaluation set. */
  setList(sets) {
    if (sets.length < 2 && !this.set) return null;
    const id = freshId("set");
    const list = h("select", { id, onchange: () => this.chooseSet(list.value) }, sets.map((name) => h("option", { value: name, selected: name === this.set }, name || "validation")));
    return h("div", { class: "field" }, h("label", { for: id }, "Prompts"), list);
  }

  chooseSet(set) {
    this.wanted.set = set;
    updateQuery({ set });
    replace(this.body, ...this.drawn());
    this.readPair();
  }

  choose(side, step) {
    this[side] = step;
    this.wanted[side] = String(step);
    updateQuery({ [side]: step });
    this.readPair();
  }

  filter(changed) {
    Object.assign(this.wanted, changed);
    updateQuery(changed);
    this.drawPair();
  }

  async readPair() {
    try {
      const [left, right] = await Promise.all([this.left, this.right].map((step) => this.readRows(step)));
      if (this.signal.aborted) return;
      this.rows = { left, right: new Map(right.map((row) => [row.index, row])) };
      this.most = ROWS;
      this.drawPair();
    } catch (problem) {
      if (problem.name === "AbortError") return;
      if (!(problem.status >= 0)) throw problem;
      replace(this.pair, failure(problem, () => this.readPair()));
    }
  }

  async readRows(step) {
    if (!this.set) return (await api.evaluationRows(this.run, step, this.signal)).map((row) => row.values);
    // A set has no responses at a step before it was added.
    if (!this.evaluations.find((item) => item.step === step)?.sets.includes(this.set)) return [];
    return (await api.evaluationSetRows(this.run, step, this.set, this.signal)).map((row) => firstSample(row.values));
  }

  drawPair() {
    if (!this.rows) return;
    const { show } = this.wanted;
    const kind = this.set ? "sampled" : this.wanted.kind;
    const text = this.search.value.trim().toLowerCase();
    const pairs = this.rows.left
      .map((left) => [left, this.rows.right.get(left.index)])
      .filter(([left, right]) => right && fits(left, right, kind, show))
      .filter(([left, right]) => !text || [left.prompt, left[kind], right[kind]].some((part) => String(part ?? "").toLowerCase().includes(text)));
    const more = pairs.length > this.most;
    replace(
      this.pair,
      h("h3", {}, `${whole(pairs.length)} of ${whole(this.rows.left.length)} prompts`, h("span", { class: "muted small" }, ` · the better response is framed`)),
      pairs.length ? pairs.slice(0, this.most).map(([left, right]) => this.pairRow(left, right, kind)) : empty("No matching prompt", "Change the filters."),
      more
        ? h("p", { class: "state" }, h("button", { class: "button", type: "button", onclick: () => ((this.most += ROWS), this.drawPair()) }, "More"))
        : null,
    );
  }

  pairRow(left, right, kind) {
    const scores = [left, right].map((row) => row[`score_${kind}`]);
    const answer = (row, at, step) => {
      const better = Number.isFinite(scores[0]) && scores[at] > scores[1 - at];
      const facts = [row.successes ?? "", `${whole(row[`tokens_${kind}`])} tokens`, row[`finished_${kind}`] === false ? "at the limit" : "", kind === "sampled" && Number.isFinite(row.kl) ? `KL ${number(row.kl)}` : ""];
      return h(
        "article",
        { class: `answer${better ? " better" : ""}` },
        h("header", {}, h("span", {}, `step ${whole(step)}${better ? " · better" : ""}`), h("span", {}, h("b", {}, number(scores[at])), ` · ${facts.filter(Boolean).join(" · ")}`)),
        h("div", { class: "prose" }, row[kind] ?? "–"),
      );
    };
    return h(
      "div",
      { class: "pair-row" },
      h("div", { class: "prose" }, h("b", {}, `${left.index + 1} `), h("span", { class: "muted" }, left.prompt), h("span", { class: "muted small" }, `  ${signed(scores[1] - scores[0])}`)),
      h("div", { class: "pair" }, answer(left, 0, this.left), answer(right, 1, this.right)),
    );
  }
}

function fits(left, right, kind, show) {
  if (show === "better") return right[`score_${kind}`] > left[`score_${kind}`];
  if (show === "worse") return right[`score_${kind}`] < left[`score_${kind}`];
  return show === "all" || left[kind] !== right[kind];
}

/** Return the row of a prompt of a set as one of a validation prompt: its first sample, and how many samples are successes. */
function firstSample({ samples, successes, ...row }) {
  const [first] = samples;
  const facts = { score_sampled: first.score, tokens_sampled: first.tokens, finished_sampled: first.finished };
  return { ...row, ...facts, sampled: first.response, successes: `${whole(successes)} of ${whole(samples.length)} succeed` };
}

/** Return the name of a metric in words, such as "gsm8k pass@8". */
function titleOf(name) {
  return words(name.replace("eval_", "").replace(/_(pass|maj)_at_(\d+)$/, " $1@$2"));
}

function known(steps, wanted, otherwise) {
  return wanted !== null && steps.includes(Number(wanted)) ? Number(wanted) : otherwise;
}

function nothing() {
  return empty("No evaluations", "Set ", h("code", {}, "evaluation.every_steps"), " and ", h("code", {}, "data.validation"), " or ", h("code", {}, "evaluation.sets"), " to evaluate the policy during training.");
}
