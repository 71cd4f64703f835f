// The processes of an active run with their health and load, and the rollout buffer.

import * as api from "../api.js";
import { healthPill, toneOf } from "../components/state_pill.js";
import { empty, fillWith } from "../components/placeholders.js";
import { facts } from "../components/table.js";
import { h, replace } from "../dom.js";
import { bytes, duration, percent, plural, whole, words } from "../format.js";
import { icon } from "../icons.js";

const POLL_INTERVAL_MS = 2500;
const ORDER = ["orchestrator", "actor", "critic", "reward", "reference", "redis"];
const BUSY = ["blue", "orange", "green", "pink", "yellow", "grey"];

/** Draw the page; `signal` ends it. */
export async function servicesPage({ frame, run, element, signal }) {
  const page = new ServicesPage(frame, run, signal);
  replace(element, page.element);
  await page.read();
}

class ServicesPage {
  constructor(frame, run, signal) {
    Object.assign(this, { frame, run, signal });
    this.summary = h("span", { class: "muted small", role: "status" });
    this.body = h("div", {});
    this.element = h("div", {}, h("div", { class: "page-head" }, h("h2", {}, "Services"), this.summary), this.body);
    frame.events.on("services", ({ services }) => this.update(services), signal);
    const timer = setInterval(() => document.visibilityState === "visible" && frame.detail.live && this.poll(), POLL_INTERVAL_MS);
    signal.addEventListener("abort", () => clearInterval(timer));
  }

  async read() {
    await fillWith(
      this.body,
      async () => {
        await this.fetch();
        return this.drawn();
      },
      this.signal,
    );
  }

  async fetch() {
    [this.services, this.buffer] = await Promise.all([
      api.services(this.run, this.signal),
      this.frame.detail.live ? api.buffer(this.run, this.signal) : null,
    ]);
  }

  /** Read the processes again. If that fails, the current content stays. */
  async poll() {
    try {
      await this.fetch();
    } catch (problem) {
      if (problem.status >= 0 || problem.name === "AbortError") return;
      throw problem;
    }
    this.redraw();
  }

  update(services) {
    if (!services || !this.services) return;
    this.services = services;
    this.redraw();
  }

  redraw() {
    if (!this.signal.aborted) replace(this.body, this.drawn());
  }

  drawn() {
    const { services } = this;
    if (!services.length) return h("div", { class: "panel" }, empty("The run is not active", "During training, its processes appear here with their health and load."));
    const unhealthy = services.filter((service) => service.health !== "serving");
    const summary = unhealthy.length ? `not healthy: ${unhealthy.map((service) => service.role).join(", ")}` : `all ${plural(services.length, "process", "processes")} serving`;
    if (this.summary.textContent !== summary) this.summary.textContent = summary;
    return h("div", { class: "cards" }, [...services].sort((a, b) => ORDER.indexOf(a.role) - ORDER.indexOf(b.role)).map(card), this.buffer ? bufferCard(this.buffer) : null);
  }
}

function card(service) {
  return h(
    "section",
    { class: "card", "data-tone": toneOf(service.health), "aria-label": service.role, "data-role": service.role, "data-health": service.health },
    h("div", { class: "card-head" }, h("h3", {}, service.role), healthPill(service.health)),
    service.detail ? h("p", { class: `notice ${service.health === "serving" ? "plain" : "bad"}` }, icon("warn"), service.detail) : null,
    load(service),
    facts([
      ["Address", h("code", {}, service.address)],
      ["Model", service.model],
      ["Device", [service.device, service.dtype].filter(Boolean).join(", ") || null],
      ["Parameters", service.parameters === null ? null : whole(service.parameters)],
      ["Policy version", service.policy_version === null ? null : whole(service.policy_version)],
      ["Step", service.step === null ? null : whole(service.step)],
      ["Micro-batch", microBatch(service)],
    ]),
    busy(service.busy_seconds),
  );
}

/** Return the micro-batch size of updates; null for a model that is not trained. */
function microBatch({ micro_batch_tokens: tokens, gradient_checkpointing: checkpointing }) {
  if (tokens === null) return null;
  return `at most ${plural(tokens, "token")}${checkpointing ? ", gradient checkpointing" : ""}`;
}

function load({ load: share }) {
  if (share === null) return null;
  return h(
    "div",
    {},
    h("div", { class: "meter-line" }, h("span", { class: "muted" }, "Load"), h("b", {}, percent(share))),
    h("div", { class: "meter", role: "meter", "aria-label": "Load", "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(share * 100) }, h("div", { style: { transform: `scaleX(${Math.min(1, share)})` } })),
  );
}

function busy(kinds) {
  const all = Object.entries(kinds ?? {}).filter(([, time]) => time > 0).sort((a, b) => b[1] - a[1]);
  const sum = all.reduce((total, [, seconds]) => total + seconds, 0);
  if (!sum) return null;
  return h(
    "div",
    {},
    h("p", { class: "muted small" }, `Busy for ${duration(sum)} since its start`),
    h(
      "div",
      { style: { display: "flex", gap: "2px", height: "8px", margin: "5px 0" }, "aria-hidden": "true" },
      all.map(([, seconds], at) => h("i", { style: { flex: String(seconds), background: `var(--${BUSY[at % BUSY.length]})`, "border-radius": "2px" } })),
    ),
    h("div", { class: "keys" }, all.map(([kind, seconds], at) => h("span", {}, h("i", { style: { "--key": `var(--${BUSY[at % BUSY.length]})` } }), `${words(kind)} ${percent(seconds / sum)}`))),
  );
}

function bufferCard(buffer) {
  const steps = buffer.experience_steps;
  return h(
    "section",
    { class: "card", "data-tone": buffer.reachable ? "good" : "bad", "aria-label": "Buffer" },
    h("div", { class: "card-head" }, h("h3", {}, "Buffer"), healthPill(buffer.reachable ? "serving" : "unreachable")),
    facts([
      ["Pending rollouts", whole(buffer.rollouts)],
      ["Stored experience", steps.length ? `${plural(steps.length, "step")}: ${steps.length > 6 ? `${steps[0]} … ${steps.at(-1)}` : steps.join(", ")}` : "none"],
      ["Memory", bytes(buffer.memory_bytes)],
    ]),
  );
}
