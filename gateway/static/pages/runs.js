// All runs of the folder with their states; start a run, or select several to compare.

import { to } from "../address.js";
import * as api from "../api.js";
import { statePill } from "../components/state_pill.js";
import { empty, failure, loading } from "../components/placeholders.js";
import { table } from "../components/table.js";
import { h, replace } from "../dom.js";
import { ago, moment, number, steps } from "../format.js";
import { icon } from "../icons.js";
import { startRunDialog } from "./start_run.js";

const POLL_INTERVAL_MS = 5000;

/** Draw the page; `signal` ends it. */
export async function runsPage({ main, where, signal, session }) {
  document.title = "Runs · Quartet";
  replace(where);
  const page = new RunsPage(session, signal);
  replace(main, page.element);
  await page.read();
}

class RunsPage {
  constructor(session, signal) {
    this.signal = signal;
    this.chosen = new Set();
    this.search = h("input", { type: "search", placeholder: "Filter by name", "aria-label": "Filter by name", "data-filter": true, oninput: () => this.draw() });
    this.compare = h("a", { class: "button", role: "link", "aria-disabled": "true" }, icon("chart"), "Compare");
    this.settings = h("a", { class: "button", href: to(["compare"], { group: "setting" }) }, "Compare settings");
    this.list = h("div", { class: "panel" }, loading());
    const mayStart = session.may_start_runs && session.access === "operator";
    this.element = h(
      "div",
      {},
      h(
        "div",
        { class: "page-head" },
        h("h1", {}, "Runs"),
        h(
          "div",
          { class: "end" },
          this.search,
          this.compare,
          this.settings,
          mayStart ? h("button", { class: "button primary", type: "button", onclick: () => this.start() }, icon("plus"), "Start a run") : null,
        ),
      ),
      this.list,
    );
    this.drawCompare();
    const timer = setInterval(() => document.visibilityState === "visible" && this.read(true), POLL_INTERVAL_MS);
    signal.addEventListener("abort", () => clearInterval(timer));
  }

  async read(quietly = false) {
    try {
      let cursor = null;
      const runs = [];
      do {
        const answer = await api.runs({ limit: 500, cursor }, this.signal);
        runs.push(...api.itemsOf(answer));
        cursor = answer.next ?? null;
      } while (cursor);
      const text = JSON.stringify(runs);
      if (text === this.text) return;
      this.text = text;
      this.runs = runs;
      this.draw();
    } catch (problem) {
      if (problem.name === "AbortError" || (quietly && problem.status >= 0)) return;
      if (!(problem.status >= 0)) throw problem;
      replace(this.list, failure(problem, () => this.read()));
    }
  }

  draw() {
    if (!this.runs) return;
    const wanted = this.search.value.trim().toLowerCase();
    const runs = this.runs.filter((run) => run.name.toLowerCase().includes(wanted));
    if (!this.runs.length) {
      return replace(this.list, empty("No runs yet", "A run appears here when ", h("code", {}, "quartet train"), " has created its folder."));
    }
    if (!runs.length) return replace(this.list, empty("No matching run", "Change the filter."));
    const focused = document.activeElement?.id;
    replace(this.list, this.table(runs));
    if (focused) document.getElementById(focused)?.focus();
  }

  table(runs) {
    return table({
      caption: "Runs",
      rows: runs,
      href: (run) => to(["runs", run.name, "overview"]),
      columns: [
        { label: h("span", { class: "unseen" }, "Compare"), cell: (run) => this.box(run) },
        { label: "Run", head: true, cell: (run) => name(run) },
        { label: "State", cell: (run) => statePill(run.state) },
        { label: "Step", cell: (run) => progress(run) },
        { label: "Reward", number: true, cell: (run) => number(run.reward_mean) },
        { label: "KL", number: true, cell: (run) => number(run.kl_mean) },
        { label: "Estimator", cell: (run) => run.estimator },
        { label: "Seed", number: true, cell: (run) => String(run.seed) },
        { label: "Last step", number: true, cell: (run) => h("time", { title: moment(run.changed) }, ago(run.changed)) },
      ],
    });
  }

  box(run) {
    const box = h("input", {
      type: "checkbox",
      id: `compare-${run.name}`,
      "aria-label": `Compare ${run.name}`,
      checked: this.chosen.has(run.name),
      onchange: () => {
        if (box.checked) this.chosen.add(run.name);
        else this.chosen.delete(run.name);
        this.drawCompare();
      },
    });
    return box;
  }

  drawCompare() {
    const names = [...this.chosen];
    const ready = names.length >= 2;
    if (ready) this.compare.href = to(["compare"], { runs: names.join(",") });
    else this.compare.removeAttribute("href");
    this.compare.setAttribute("aria-disabled", String(!ready));
    this.compare.title = ready ? "" : "Select at least two runs in the list";
    replace(this.compare, icon("chart"), names.length ? `Compare ${names.length}` : "Compare");
    this.compare.classList.toggle("muted", !ready);
    this.settings.href = to(["compare"], { runs: names.join(","), group: "setting" });
  }

  async start() {
    const started = await startRunDialog();
    if (started) location.hash = to(["runs", started.name, "overview"]);
  }
}

function name(run) {
  const link = h("a", { href: to(["runs", run.name, "overview"]) }, run.name);
  return run.problem ? [link, h("p", { class: "bad small", style: { "white-space": "normal", "max-width": "60ch" } }, run.problem)] : link;
}

function progress(run) {
  const share = run.total_steps ? Math.min(1, run.step / run.total_steps) : 0;
  return h(
    "div",
    { style: { "min-width": "120px" } },
    h("div", { class: "small" }, steps(run.step, run.total_steps)),
    h("div", { class: "bar", "aria-hidden": "true" }, h("i", { style: { width: `${share * 100}%` } })),
  );
}
