// The last lines of the processes' logs.

import { updateQuery } from "../address.js";
import * as api from "../api.js";
import { empty, failure, loading } from "../components/placeholders.js";
import { freshId, h, replace } from "../dom.js";
import { bytes, plural } from "../format.js";

const POLL_INTERVAL_MS = 2000;
const LINES = [200, 500, 2000];
const LEVELS = [
  [/level='?(error|critical)/, "line-bad"],
  [/level='?warn/, "line-warn"],
  [/^(Traceback|\w+Error:)/, "line-bad"],
];

/** Draw the page; `signal` ends it. */
export async function logsPage({ run, element, query, signal }) {
  const page = new LogsPage(run, signal, query.get("log"));
  replace(element, page.element);
  await page.start();
}

class LogsPage {
  constructor(run, signal, wanted) {
    Object.assign(this, { run, signal, wanted });
    const ids = { log: freshId("log"), lines: freshId("lines") };
    this.which = h("select", { id: ids.log, onchange: () => this.choose(this.which.value) });
    this.lines = h("select", { id: ids.lines, onchange: () => this.read() }, LINES.map((count) => h("option", { value: count }, `${count} lines`)));
    this.search = h("input", { type: "search", placeholder: "Filter lines", "aria-label": "Filter lines", "data-filter": true, oninput: () => this.draw() });
    this.follow = h("input", { type: "checkbox", checked: true, onchange: () => this.draw() });
    this.wrap = h("input", { type: "checkbox", onchange: () => this.text.classList.toggle("wrapped", this.wrap.checked) });
    this.summary = h("span", { class: "muted small" });
    this.text = h("pre", { class: "log", tabindex: 0, role: "region", "aria-label": "Log" });
    this.body = h("div", { class: "panel" }, loading("300px"));
    this.element = h(
      "div",
      {},
      h(
        "div",
        { class: "page-head" },
        h("h2", {}, "Logs"),
        h("label", { class: "unseen", for: ids.log }, "Log"),
        this.which,
        h("label", { class: "unseen", for: ids.lines }, "Lines"),
        this.lines,
        this.summary,
        h("div", { class: "end" }, this.search, h("label", { class: "check" }, this.wrap, "wrap"), h("label", { class: "check" }, this.follow, "follow")),
      ),
      this.body,
    );
    // Scrolling up stops following the log; scrolling to the end resumes it.
    this.text.addEventListener("scroll", () => {
      if (!this.moving) this.follow.checked = this.text.scrollTop + this.text.clientHeight > this.text.scrollHeight - 24;
    });
    const timer = setInterval(() => document.visibilityState === "visible" && this.follow.checked && this.log && this.read(), POLL_INTERVAL_MS);
    signal.addEventListener("abort", () => clearInterval(timer));
  }

  async start() {
    try {
      const logs = await api.logs(this.run, this.signal);
      if (!logs.length) return replace(this.body, empty("No logs", "The processes write their logs to logs/ in the run's folder."));
      const names = logs.map((log) => log.name);
      replace(this.which, logs.map((log) => h("option", { value: log.name }, `${log.name} (${bytes(log.bytes)})`)));
      this.log = names.includes(this.wanted) ? this.wanted : names.includes("orchestrator") ? "orchestrator" : names[0];
      this.which.value = this.log;
      await this.read();
    } catch (problem) {
      this.fail(problem);
    }
  }

  choose(name) {
    this.log = name;
    this.follow.checked = true;
    updateQuery({ log: name });
    return this.read();
  }

  async read() {
    const requested = this.log;
    try {
      const tail = await api.logTail(this.run, requested, this.lines.value, this.signal);
      if (requested !== this.log || this.signal.aborted) return;
      if (this.tail && this.shown === requested && tail.lines.at(-1) === this.tail.lines.at(-1) && tail.lines.length === this.tail.lines.length) return;
      this.shown = requested;
      this.tail = tail;
      if (!this.text.isConnected) replace(this.body, this.text);
      this.draw();
    } catch (problem) {
      this.fail(problem);
    }
  }

  draw() {
    if (!this.tail) return;
    const wanted = this.search.value.toLowerCase();
    const lines = this.tail.lines.filter((line) => line.toLowerCase().includes(wanted));
    const summary = `${plural(lines.length, "line")}${this.tail.truncated ? "; earlier lines are in the file" : ""}`;
    if (this.summary.textContent !== summary) this.summary.textContent = summary;
    const items = lines.map((line) => h("span", { class: LEVELS.find(([pattern]) => pattern.test(line))?.[1] }, `${line}\n`));
    replace(this.text, items.length ? items : h("span", { class: "muted" }, wanted ? "No matching line." : "The log is empty."));
    if (this.follow.checked) {
      this.moving = true;
      this.text.scrollTop = this.text.scrollHeight;
      requestAnimationFrame(() => (this.moving = false));
    }
  }

  fail(problem) {
    if (problem.name === "AbortError") return;
    if (!(problem.status >= 0)) throw problem;
    this.tail = null;
    replace(this.body, failure(problem, () => this.start()));
  }
}
