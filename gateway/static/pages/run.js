// One run: header, controls and sections, and the event stream that all its pages share.

import { to } from "../address.js";
import * as api from "../api.js";
import { RunControls } from "../components/run_controls.js";
import { RunHeader } from "../components/run_header.js";
import { loading } from "../components/placeholders.js";
import { add, h, replace } from "../dom.js";
import { EventStream } from "../event_stream.js";
import { icon } from "../icons.js";
import { recording } from "../recording.js";
import { showConnection } from "../toolbar.js";
import { checkpointsPage } from "./checkpoints.js";
import { configPage } from "./config.js";
import { evaluationsPage } from "./evaluations.js";
import { guardsPage } from "./guards.js";
import { logsPage } from "./logs.js";
import { overviewPage } from "./overview.js";
import { servicesPage } from "./services.js";
import { stepsPage } from "./steps.js";
import { trajectoryPage } from "./trajectory.js";
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
].filter(([name]) => !recording || !["services", "logs"].includes(name));

/** Sections of a stage before RLHF, which has no responses and no services. */
const STAGE_SECTIONS = ["overview", "config"];

/** Delay before the numbers of alerts and checkpoints are read again: events often arrive together. */
const RECOUNT_DELAY_MS = 500;
/** Time that the page waits for the start of the event stream. */
const STREAM_TIMEOUT_MS = 1000;
/** States of a run without an active orchestrator. */
const INACTIVE_STATES = ["finished", "stopped", "failed", "idle"];

/** The state shared by all pages of a run. */
export class RunFrame {
  constructor(run, { main, sections, where, session }) {
    this.run = run;
    this.main = main;
    this.sections = sections;
    this.where = where;
    this.session = session;
    this.life = new AbortController();
    this.events = new EventStream(run);
    this.content = h("div", { class: "page" });
  }

  /** Read the run and open its event stream. Raises Problem. */
  async start() {
    const { signal } = this.life;
    replace(this.main, loading("60vh"));
    this.drawSections();
    // Open the stream first: events that arrive while the run is read are queued and applied afterwards.
    this.events.on("state", showConnection, signal);
    showConnection(recording ? null : "waiting");
    this.queued = [];
    this.listen(signal);
    const streamStarted = new Promise((resolve) => this.events.addEventListener("progress", resolve, { once: true, signal }));
    if (!recording) {
      this.events.start();
      await Promise.race([streamStarted, new Promise((resolve) => setTimeout(resolve, STREAM_TIMEOUT_MS))]);
    }
    const inTime = this.queued.length > 0;
    [this.detail, this.definitions] = await Promise.all([api.run(this.run, signal), api.metricDefinitions(signal)]);
    this.controls = new RunControls(this);
    this.head = new RunHeader(this);
    this.drawSections();
    this.drawWhere();
    replace(this.main, this.head.element, this.content);
    this.head.readRecentSteps(signal);
    for (const handle of this.queued) handle();
    // If the run was read before the stream started, changes in between are in neither: read it again.
    if (!inTime) streamStarted.then(() => this.reload());
  }

  listen(signal) {
    const on = (type, handle) =>
      this.events.on(type, (data) => (this.head ? handle(data) : this.queued.push(() => handle(data))), signal);
    on("progress", (progress) => this.progressed(progress));
    on("step", ({ step, metrics }) => this.stepped(step, metrics));
    on("rewind", () => this.reload());
    on("checkpoint", () => this.recount());
    on("alert", () => this.recount());
  }

  /** Read the numbers of alerts and checkpoints again: an event may have been counted before. */
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
    }, RECOUNT_DELAY_MS);
  }

  progressed(progress) {
    const { detail } = this;
    const wasLive = detail.live;
    detail.progress = progress;
    detail.state = progress.state;
    detail.live = !INACTIVE_STATES.includes(progress.state);
    detail.step = progress.step;
    detail.total_steps = progress.total_steps;
    if (wasLive === detail.live) this.redraw();
    else this.reload();
  }

  stepped(step, metrics) {
    if (step <= this.detail.step && step <= (this.detail.lastStepSeen ?? 0)) return;
    this.detail.lastStepSeen = step;
    const newNames = Object.keys(metrics).filter((name) => !this.detail.metric_names.includes(name));
    if (newNames.length) this.detail.metric_names.push(...newNames);
    this.detail.step = Math.max(step, this.detail.step);
    this.detail.changed = Date.now() / 1000;
    this.head.stepped(step, metrics);
    this.redraw();
  }

  redraw() {
    this.head.draw();
    this.controls.draw();
  }

  /** Read everything again: the run was rolled back, or the stream may have missed events. */
  async reload() {
    try {
      this.detail = await api.run(this.run, this.life.signal);
    } catch (problem) {
      if (problem.name === "AbortError" || problem.status >= 0) return;
      throw problem;
    }
    this.redraw();
    this.drawSections();
    this.head.readRecentSteps(this.life.signal);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  }

  /** Show the section that the address names. */
  async show(parts, query, signal) {
    const section = SECTIONS.find(([name]) => name === parts[0]) ?? SECTIONS[0];
    const [name, title] = section;
    document.title = `${title} · ${this.run} · Quartet`;
    for (const link of this.sections.querySelectorAll("a")) {
      if (link.dataset.section === name) {
        link.setAttribute("aria-current", "page");
        this.sections.scrollLeft = link.offsetLeft - (this.sections.clientWidth - link.offsetWidth) / 2;
      } else link.removeAttribute("aria-current");
    }
    const page = name === "trajectories" && parts.length >= 4 ? trajectoryPage : section[3];
    const content = h("div", { class: "page" });
    this.content.replaceWith(content);
    this.content = content;
    await page({ frame: this, run: this.run, element: content, parts: parts.slice(1), query, signal });
  }

  /** Open a section by its position in the list. */
  open(number) {
    if (SECTIONS[number]) location.hash = this.address(SECTIONS[number][0]);
  }

  /** Return the names of metrics that the run has; all of `names` before its first step. */
  known(names) {
    const has = this.detail.metric_names;
    const available = names.filter((name) => has.includes(name));
    return available.length ? available : names;
  }

  /** Return the address of a section of this run. */
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
        SECTIONS.filter(([name]) => !this.detail?.has_stage || STAGE_SECTIONS.includes(name)).map(([name, title, shape]) =>
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
    if (recording) return replace(this.where, h("span", { class: "muted small" }, recording.about));
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

  /** Close the stream and remove the run's elements. */
  end() {
    this.life.abort();
    clearTimeout(this.counting);
    this.events.stop();
    showConnection(null);
    this.sections.hidden = true;
    replace(this.where);
  }
}
