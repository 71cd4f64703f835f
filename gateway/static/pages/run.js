// One run: its head with state, progress and controls, its sections, and its stream of events, which all its pages share.

import { to } from "../address.js";
import * as api from "../api.js";
import { Controls } from "../components/controls.js";
import { RunHead } from "../components/run_head.js";
import { loading } from "../components/states.js";
import { add, h, replace } from "../dom.js";
import { Events } from "../events.js";
import { icon } from "../icons.js";
import { showConnection } from "../tools.js";
import { checkpointsPage } from "./checkpoints.js";
import { configPage } from "./config.js";
import { evaluationsPage } from "./evaluations.js";
import { guardsPage } from "./guards.js";
import { inspectorPage } from "./inspector.js";
import { logsPage } from "./logs.js";
import { overviewPage } from "./overview.js";
import { servicesPage } from "./services.js";
import { stepsPage } from "./steps.js";
import { trajectoriesPage } from "./trajectories.js";

const SECTIONS = [
  ["overview", "Overview", "chart", overviewPage],
  ["steps", "Steps", "bars", stepsPage],
  ["trajectories", "Trajectories", "text", trajectoriesPage],
  ["evaluations", "Evaluations", "scales", evaluationsPage],
  ["checkpoints", "Checkpoints", "save", checkpointsPage],
  ["services", "Services", "server", servicesPage],
  ["guards", "Guards", "shield", guardsPage],
  ["logs", "Logs", "log", logsPage],
  ["config", "Config", "sliders", configPage],
];

/** Milliseconds after which it is counted what there is: more may come at once. */
const COUNT_AFTER = 500;
/** Milliseconds that a run's page waits for its stream to begin. */
const PATIENCE = 1000;
/** States in which nothing runs a run. */
const OVER = ["finished", "stopped", "failed", "idle"];

/** Holds what lasts while one moves between the pages of a run. */
export class RunFrame {
  constructor(run, { main, sections, where, session }) {
    this.run = run;
    this.main = main;
    this.sections = sections;
    this.where = where;
    this.session = session;
    this.life = new AbortController();
    this.events = new Events(run);
    this.content = h("div", { class: "page" });
  }

  /** Reads the run and opens its stream. Raises Problem. */
  async start() {
    const { signal } = this.life;
    replace(this.main, loading("60vh"));
    this.drawSections();
    // The stream first: what happens while the run is read is then not missed, but taken in after that.
    this.events.on("state", showConnection, signal);
    showConnection("waiting");
    this.early = [];
    this.listen(signal);
    const begun = new Promise((resolve) => this.events.addEventListener("progress", resolve, { once: true, signal }));
    this.events.start();
    await Promise.race([begun, new Promise((resolve) => setTimeout(resolve, PATIENCE))]);
    const inTime = this.early.length > 0;
    this.detail = await api.run(this.run, signal);
    this.controls = new Controls(this);
    this.head = new RunHead(this);
    this.drawSections();
    this.drawWhere();
    replace(this.main, this.head.element, this.content);
    this.head.readPace(signal);
    for (const take of this.early) take();
    // Where the run was read before the stream began, what came in between was in neither.
    if (!inTime) begun.then(() => this.again());
  }

  listen(signal) {
    const on = (type, take) =>
      this.events.on(type, (news) => (this.head ? take(news) : this.early.push(() => take(news))), signal);
    on("progress", (progress) => this.progressed(progress));
    on("step", ({ step, metrics }) => this.stepped(step, metrics));
    on("rewind", () => this.again());
    on("checkpoint", () => this.recount());
    on("alert", () => this.recount());
  }

  /** Reads how many there are of what is only counted: some of it may have been told before. */
  recount() {
    this.counting ??= setTimeout(async () => {
      this.counting = null;
      try {
        const { alerts, checkpoints } = await api.run(this.run, this.life.signal);
        Object.assign(this.detail, { alerts, checkpoints });
      } catch (problem) {
        if (problem.name === "AbortError" || problem.status >= 0) return;
        throw problem;
      }
      this.drawSections();
    }, COUNT_AFTER);
  }

  progressed(progress) {
    const { detail } = this;
    const wasLive = detail.live;
    detail.progress = progress;
    detail.state = progress.state;
    detail.live = !OVER.includes(progress.state);
    detail.step = progress.step;
    detail.total_steps = progress.total_steps;
    if (wasLive === detail.live) this.redraw();
    else this.again();
  }

  stepped(step, metrics) {
    if (step <= this.detail.step && step <= (this.detail.lastStepSeen ?? 0)) return;
    this.detail.lastStepSeen = step;
    const news = Object.keys(metrics).filter((name) => !this.detail.metric_names.includes(name));
    if (news.length) this.detail.metric_names.push(...news);
    this.detail.step = Math.max(step, this.detail.step);
    this.detail.changed = Date.now() / 1000;
    this.head.stepped(step, metrics);
    this.redraw();
  }

  redraw() {
    this.head.draw();
    this.controls.draw();
  }

  /** Reads everything anew: the run went back, or its stream cannot say what was missed. */
  async again() {
    try {
      this.detail = await api.run(this.run, this.life.signal);
    } catch (problem) {
      if (problem.name === "AbortError" || problem.status >= 0) return;
      throw problem;
    }
    this.redraw();
    this.drawSections();
    this.head.readPace(this.life.signal);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  }

  /** Shows the section that the address names. */
  async show(parts, query, signal) {
    const found = SECTIONS.find(([name]) => name === parts[0]) ?? SECTIONS[0];
    const [name, title] = found;
    document.title = `${title} · ${this.run} · Quartet`;
    for (const link of this.sections.querySelectorAll("a")) {
      if (link.dataset.section === name) {
        link.setAttribute("aria-current", "page");
        this.sections.scrollLeft = link.offsetLeft - (this.sections.clientWidth - link.offsetWidth) / 2;
      } else link.removeAttribute("aria-current");
    }
    const page = name === "trajectories" && parts.length >= 4 ? inspectorPage : found[3];
    const content = h("div", { class: "page" });
    this.content.replaceWith(content);
    this.content = content;
    await page({ frame: this, run: this.run, element: content, parts: parts.slice(1), query, signal });
  }

  /** Opens a section by its place in the list. */
  open(number) {
    if (SECTIONS[number]) location.hash = this.address(SECTIONS[number][0]);
  }

  /** Those of `names` that the run has; all of them before its first step. */
  known(names) {
    const has = this.detail.metric_names;
    const found = names.filter((name) => has.includes(name));
    return found.length ? found : names;
  }

  /** The address of a section of this run. */
  address(section, query = {}) {
    return to(["runs", this.run, ...section.split("/")], query);
  }

  get mayCommand() {
    return this.session.access === "operator";
  }

  drawSections() {
    const current = this.sections.querySelector("[aria-current]")?.dataset.section;
    this.sections.hidden = false;
    replace(
      this.sections,
      h(
        "ul",
        {},
        SECTIONS.map(([name, title, shape]) =>
          h(
            "li",
            {},
            h(
              "a",
              { href: this.address(name), "data-section": name, "aria-current": name === current ? "page" : null },
              icon(shape),
              title,
              name === "guards" && this.detail?.alerts ? this.alertCount() : null,
            ),
          ),
        ),
      ),
    );
  }

  alertCount() {
    const count = this.detail.alerts;
    return h("span", { class: "count" }, count, h("span", { class: "unseen" }, count === 1 ? " alert" : " alerts"));
  }

  async drawWhere() {
    replace(this.where, h("a", { href: "#/runs" }, "Runs"), h("span", { "aria-hidden": "true" }, "/"));
    const others = await api.runs({ limit: 100 }, this.life.signal).then(api.itemsOf).catch(() => []);
    if (this.life.signal.aborted) return;
    const names = new Set([this.run, ...others.map((run) => run.name)]);
    const choose = h(
      "select",
      { "aria-label": "Run", onchange: () => (location.hash = to(["runs", choose.value, "overview"])) },
      [...names].map((name) => h("option", { value: name, selected: name === this.run }, name)),
    );
    add(this.where, choose);
  }

  /** Closes the stream and clears what belongs to the run alone. */
  end() {
    this.life.abort();
    clearTimeout(this.counting);
    this.events.stop();
    showConnection(null);
    this.sections.hidden = true;
    replace(this.where);
  }
}
