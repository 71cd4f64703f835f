// The processes of an active run with their health and load, and the rollout buffer.

import * as api from "../api.js";
import { healthPill, toneOf } from "../components/state_pill.js";
import { empty, fillWith } from "../components/placeholders.js";
import { facts, table } from "../components/table.js";
import { toastProblem } from "../components/toast.js";
import { h, replace } from "../dom.js";
import { bytes, duration, number, percent, plural, seconds, whole, words } from "../format.js";
import { icon } from "../icons.js";

const POLL_INTERVAL_MS = 2500;
const ORDER = ["orchestrator", "actor", "generator", "critic", "reward", "reference", "environment", "redis"];
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
    [this.services, this.buffer, this.profiles] = await Promise.all([
      api.services(this.run, this.signal),
      this.frame.detail.live ? api.buffer(this.run, this.signal) : null,
      api.profiles(this.run, this.signal),
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
    if (this.signal.aborted) return;
    const before = this.body.querySelector(".scroll");
    const [left, focused] = [before?.scrollLeft ?? 0, document.activeElement === before];
    replace(this.body, this.drawn());
    const after = this.body.querySelector(".scroll");
    if (!after) return;
    after.scrollLeft = left;
    if (focused) after.focus();
  }

  drawn() {
    const { services } = this;
    const profiles = this.profiles.length ? profilesPanel(this.run, this.profiles) : null;
    if (!services.length) {
      const inactive = h("div", { class: "panel" }, empty("The run is not active", "During training, its processes appear here with their health and load."));
      return h("div", { class: "stack" }, inactive, profiles);
    }
    const unhealthy = services.filter((service) => service.health !== "serving");
    const summary = unhealthy.length ? `not healthy: ${unhealthy.map((service) => nameOf(service)).join(", ")}` : `all ${plural(services.length, "process", "processes")} serving`;
    if (this.summary.textContent !== summary) this.summary.textContent = summary;
    const generators = services.filter((service) => service.role === "generator");
    const others = services.filter((service) => service.role !== "generator").sort((a, b) => ORDER.indexOf(a.role) - ORDER.indexOf(b.role));
    return h(
      "div",
      { class: "stack" },
      h("div", { class: "cards" }, others.map((service) => card(service, !generators.length)), this.buffer ? bufferCard(this.buffer) : null),
      generators.length ? generatorsPanel(generators) : null,
      profiles,
    );
  }
}

/** Return one row per process of each profile, with a button that saves its trace. */
function profilesPanel(run, profiles) {
  const rows = profiles.flatMap((profile) => profile.services.map((service) => ({ profile, service, summary: service.summary })));
  const share = (field) => ({ summary }) => (summary?.seconds ? percent(summary[field] / summary.seconds) : "–");
  const top = ({ summary }) => (summary?.kernels.length ? summary.kernels : (summary?.operators ?? []))[0]?.name ?? "–";
  const columns = [
    { label: "Steps", head: true, cell: ({ profile }) => `${profile.step}–${profile.last_step}` },
    { label: "Process", cell: ({ service }) => [service.service, service.problem ? h("p", { class: "small" }, `incomplete: ${service.problem}`) : null] },
    { label: "Time", number: true, cell: ({ summary }) => seconds(summary?.seconds) },
    { label: "Computes", number: true, cell: share("compute_seconds") },
    { label: "Gaps in calls", number: true, cell: share("gap_seconds") },
    { label: "Exposed communication", number: true, cell: share("exposed_communication_seconds") },
    { label: "Most time", cell: (row) => h("code", {}, top(row).slice(0, 48)) },
    { label: "Trace", cell: ({ profile, service }) => (service.file ? traceButton(run, profile.step, service) : "–") },
  ];
  return h(
    "section",
    { class: "panel padded stack", "data-section": "profiles" },
    h("h3", {}, "Profiles"),
    h("p", { class: "muted small" }, "Of quartet profile, newest first. Shares are of the time of the profile; in the rest, the process waited for calls."),
    table({ caption: "Profiles", columns, rows, short: true }),
  );
}

/** Return a button that saves a trace. A link could not send the token. */
function traceButton(run, step, { file, bytes: size }) {
  const save = async () => {
    try {
      const url = URL.createObjectURL(await api.trace(run, step, file));
      h("a", { href: url, download: `step-${step}-${file}` }).click();
      setTimeout(() => URL.revokeObjectURL(url), 10000);
    } catch (problem) {
      toastProblem(problem);
    }
  };
  return h("button", { class: "button", type: "button", "aria-label": `Save the trace ${file} of step ${step}`, onclick: save }, bytes(size));
}

/** Return the card of a process. `generates`: the actor generates, so its engine is that of the run. */
function card(service, generates) {
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
      ["Open sessions", service.open_sessions === null ? null : whole(service.open_sessions)],
      ["Step", service.step === null ? null : whole(service.step)],
      ["Micro-batch", microBatch(service)],
      ["Published", publication(service)],
      ...service.devices.map((reading) => [`Use of ${reading.name}`, use(reading)]),
    ]),
    service.engine && generates ? guarantees(service.engine) : null,
    busy(service.busy_seconds),
  );
}

/** Return what a device reports of itself; null if it reports nothing. */
function use({ busy: share, memory_used_bytes: used, memory_total_bytes: total, power_watts: watts }) {
  const memory = used === null ? null : `${bytes(used)}${total === null ? "" : ` of ${bytes(total)}`}`;
  const parts = [share === null ? null : `${percent(share)} busy`, memory, watts === null ? null : `${number(watts)} W`];
  return parts.filter(Boolean).join(", ") || null;
}

/** Return the name of a process for people: a run may have several generators. */
const nameOf = ({ role, address }) => (role === "generator" ? `generator ${address}` : role);

const shortDigest = (digest) => h("code", { title: digest }, digest.slice(0, 8));

/** Return the newest version that the actor has published for generators; null if there is none. */
function publication({ last_publication: last }) {
  if (!last) return null;
  return [`version ${whole(last.policy_version)}, digest `, shortDigest(last.digest), `, ${bytes(last.total_bytes)}, ${seconds(last.seconds)}`];
}

/** Return how an update came, and how many bytes were received. */
function updateSize(last) {
  if (!last) return "–";
  return last.bytes ? `${last.way}, ${bytes(last.bytes)}` : last.way;
}

/** Return one row per generator, and what their engines guarantee. */
function generatorsPanel(generators) {
  const columns = [
    { label: "Generator", head: true, cell: ({ address }) => h("code", {}, address) },
    { label: "State", cell: (service) => [healthPill(service.health), service.detail ? h("p", { class: "small" }, service.detail) : null] },
    { label: "Engine", cell: ({ engine, device }) => [engine?.name, device].filter(Boolean).join(", ") || "–" },
    { label: "Load", number: true, cell: ({ load: share }) => percent(share) },
    { label: "Devices", cell: ({ devices }) => devices.map((reading) => h("div", {}, `${reading.name}: ${use(reading) ?? "–"}`)) },
    { label: "Tokens/s", number: true, cell: ({ tokens_per_second: rate }) => number(rate) },
    { label: "Tokens", number: true, cell: ({ tokens_generated: tokens }) => whole(tokens) },
    { label: "Assigned", number: true, cell: ({ trajectories }) => whole(trajectories) },
    { label: "Queue", number: true, cell: ({ work_pending: pending }) => whole(pending) },
    { label: "Version", number: true, cell: ({ policy_version: version }) => whole(version) },
    { label: "Digest", cell: ({ last_transfer: last }) => (last ? shortDigest(last.digest) : "–") },
    { label: "Last update", cell: ({ last_transfer: last }) => updateSize(last) },
    { label: "From", cell: ({ last_transfer: last }) => (last?.source ? h("code", {}, last.source) : "–") },
    { label: "Transfer", number: true, cell: ({ last_transfer: last }) => seconds(last?.transfer_seconds) },
    { label: "Load weights", number: true, cell: ({ last_transfer: last }) => seconds(last?.load_seconds) },
  ];
  const engines = new Map(generators.filter(({ engine }) => engine).map(({ engine }) => [JSON.stringify(engine), engine]));
  return h(
    "section",
    { class: "panel padded stack", "data-section": "generators" },
    h("h3", {}, "Generators"),
    h("p", { class: "muted small" }, "Tokens/s is the mean while generating, since the start of the process. Assigned trajectories are not finished; the queue holds calls."),
    table({ caption: "Generators", columns, rows: generators }),
    [...engines.values()].map(guarantees),
  );
}

/** Return what an engine declares about itself, and what its trial measured. */
function guarantees(engine) {
  const yes = (value) => (value ? "yes" : "no");
  return h(
    "div",
    { "data-section": "engine" },
    h("p", { class: "muted small" }, `Guarantees of ${engine.name}`),
    facts([
      ["Seeded", yes(engine.seeded)],
      ["Batch-invariant", yes(engine.batch_invariant)],
      ["Trial", engine.trial || null],
      ["Log-probs", engine.log_probs],
      ["Weights", engine.weights],
      ["Digest", engine.digest],
      ["In-flight updates", yes(engine.in_flight_updates)],
    ]),
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
