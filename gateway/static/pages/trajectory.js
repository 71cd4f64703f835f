// One trajectory: prompt, response token by token, its reward, and links to its neighbours.

import { updateQuery } from "../address.js";
import * as api from "../api.js";
import { branchTree, count } from "../components/branch_tree.js";
import { buttonGroup } from "../components/button_group.js";
import { failure, loading } from "../components/placeholders.js";
import { table } from "../components/table.js";
import { TokenView, tokenColumns } from "../components/token_view.js";
import { toast, toastProblem } from "../components/toast.js";
import { h, replace } from "../dom.js";
import { exact, number, whole } from "../format.js";
import { icon } from "../icons.js";
import { MEASURES, measuresOf } from "../token_colours.js";

/** Draw the page; `parts` are step, prompt and sample. */
export async function trajectoryPage({ frame, run, element, parts, query, signal }) {
  replace(element, loading("400px"));
  const read = async () => {
    try {
      const trajectory = await api.trajectory(run, parts.slice(0, 3).join("/"), signal);
      if (signal.aborted) return;
      document.title = `Step ${trajectory.step}, prompt ${trajectory.prompt_index} · ${run} · Quartet`;
      new TrajectoryPage({ frame, run, signal, trajectory, colour: query.get("colour"), branch: query.get("branch") }).draw(element);
    } catch (problem) {
      if (signal.aborted || problem.name === "AbortError") return;
      if (!(problem.status >= 0)) throw problem;
      replace(element, failure(problem, read), h("p", { class: "state" }, h("a", { href: frame.address("trajectories") }, "All trajectories")));
    }
  };
  await read();
}

/** The number of turns of an episode with their rewards; an empty text without an environment. */
function turnsOf(branches) {
  const turns = branches.flatMap(({ segments }) => segments).filter(({ role }) => role === "policy");
  if (!turns.length) return "";
  return turns[0].reward === null ? whole(turns.length) : `${whole(turns.length)}, rewards ${turns.map(({ reward }) => number(reward)).join(", ")}`;
}

function finishReason({ finished, segments }) {
  if (segments.length) return finished ? "environment" : "limit of tokens or turns";
  return finished ? "end token" : "token limit";
}

/** The policy version of a response, or each one with its number of tokens. */
function policyVersions({ policy_version: version, version_spans: spans }) {
  if (!spans.length) return whole(version);
  return spans.map((span) => `${whole(span.policy_version)} (${whole(span.tokens)} tokens)`).join(", then ");
}

class TrajectoryPage {
  constructor({ frame, run, signal, trajectory, colour, branch }) {
    Object.assign(this, { frame, run, signal, trajectory });
    const { prompt, segments, tokens } = trajectory;
    this.branches = [{ parent: -1, shared_tokens: 0, prompt, segments, tokens }, ...trajectory.further_branches];
    this.shown = this.branches[Number(branch)] ? Number(branch) : 0;
    const measures = measuresOf(trajectory.tokens);
    this.measures = measures;
    this.colour = measures.includes(colour) ? colour : measures[0];
    document.addEventListener("keydown", (event) => this.keyed(event), { signal });
  }

  draw(element) {
    const { tokens } = this.branches[this.shown];
    replace(
      element,
      this.head(),
      h(
        "div",
        { class: "stack" },
        this.summary(),
        this.branches.length > 1 ? this.tree(element) : null,
        this.prompt(),
        tokens.length && this.colour ? this.tokens() : this.plainResponse(),
      ),
    );
  }

  /** The branches of the episode. A press shows another one. */
  tree(element) {
    const show = (index) => {
      this.shown = index;
      updateQuery({ branch: index || null });
      this.draw(element);
      element.querySelector(".branches [aria-pressed=true]")?.focus();
    };
    return h("section", { class: "panel padded stack" }, h("h3", {}, "Branches"), branchTree(this.branches, this.shown, show));
  }

  prompt() {
    const { prompt, shared_tokens: shared, parent } = this.branches[this.shown];
    const before = shared ? h("p", { class: "muted small" }, `It begins with ${count(shared, "token")} of branch ${whole(parent)}. Then follows:`) : null;
    return h("section", { class: "panel padded stack" }, h("h3", {}, "Prompt"), before, h("div", { class: "prose prompt", tabindex: 0, role: "region", "aria-label": "Prompt" }, prompt));
  }

  head() {
    const { trajectory } = this;
    const last = this.frame.detail.step;
    return h(
      "div",
      { class: "page-head" },
      h("h2", {}, `Step ${whole(trajectory.step)}, prompt ${whole(trajectory.prompt_index)}${trajectory.sample ? `, sample ${trajectory.sample}` : ""}`),
      h("a", { class: "small", href: this.frame.address("trajectories", { step: trajectory.step }) }, "all trajectories of this step"),
      h(
        "div",
        { class: "end" },
        this.to(trajectory.lower, "lower", "Lower reward"),
        this.to(trajectory.higher, "higher", "Higher reward"),
        this.button("left", "Previous step", trajectory.step > 1, () => this.toStep(trajectory.step - 1)),
        this.button("right", "Next step", trajectory.step < last, () => this.toStep(trajectory.step + 1)),
      ),
    );
  }

  to(id, shape, label) {
    return this.button(shape, label, id !== null, () => this.open(id), label);
  }

  button(shape, label, possible, onclick, text = null) {
    return h("button", { class: "button", type: "button", "aria-label": label, title: label, disabled: !possible, onclick }, icon(shape), text);
  }

  open(id) {
    location.hash = this.frame.address(`trajectories/${id.split("/").slice(-3).join("/")}`, { colour: this.colour });
  }

  /** Open the response with the highest reward of another step, which has other prompts. */
  async toStep(step) {
    try {
      const { items } = await api.trajectories(this.run, { step, sort: "-score", limit: 1 }, this.signal);
      if (items.length) this.open(items[0].id);
      else toast(`Step ${step} has no responses.`, "bad");
    } catch (problem) {
      if (problem.status >= 0) toastProblem(problem);
      else if (problem.name !== "AbortError") throw problem;
    }
  }

  keyed(event) {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, textarea, select, dialog, .scroll")) return;
    const { trajectory } = this;
    const act = {
      ArrowLeft: trajectory.lower && (() => this.open(trajectory.lower)),
      ArrowRight: trajectory.higher && (() => this.open(trajectory.higher)),
      "[": trajectory.step > 1 && (() => this.toStep(trajectory.step - 1)),
      "]": trajectory.step < this.frame.detail.step && (() => this.toStep(trajectory.step + 1)),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  summary() {
    const { trajectory } = this;
    const pairs = [
      ["Reward", number(trajectory.score)],
      ...Object.entries(trajectory.parts).map(([name, value]) => [`Reward part ${name}`, number(value)]),
      ["KL, nats", number(trajectory.kl)],
      ["KL coefficient", exact(trajectory.kl_coefficient)],
      ["Tokens", whole(trajectory.response_tokens)],
      ["Turns", turnsOf(this.branches)],
      ["Branches", this.branches.length > 1 ? whole(this.branches.length) : ""],
      ["Finish reason", finishReason(trajectory)],
      ["Policy version", policyVersions(trajectory)],
      ["Generator", trajectory.generator],
      ["Weights", trajectory.weights_digest && h("code", { title: trajectory.weights_digest }, trajectory.weights_digest.slice(0, 8))],
    ].filter(([, value]) => value);
    return h("section", { class: "panel padded" }, h("dl", { class: "facts-row" }, pairs.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value)))));
  }

  tokens() {
    const { tokens } = this.branches[this.shown];
    const view = new TokenView(tokens, this.colour);
    const pick = buttonGroup("Colour tokens by", this.measures.map((name) => [name, MEASURES[name].label]), this.colour, (name) => {
      this.colour = name;
      updateQuery({ colour: name });
      view.colourBy(name);
    });
    const rows = tokens.map((token, at) => ({ token, at }));
    return [
      h(
        "section",
        { class: "panel padded" },
        h("div", { class: "page-head" }, h("h3", {}, "Response"), h("div", { class: "end" }, h("span", { class: "muted small" }, "colour by"), pick)),
        view.legend,
        view.facts,
        view.text,
        view.strip,
      ),
      h(
        "section",
        { class: "panel" },
        h("h3", {}, "Values of each token"),
        table({ caption: "Tokens of the response", rows, columns: tokenColumns }),
      ),
    ];
  }

  plainResponse() {
    return h(
      "section",
      { class: "panel padded stack" },
      h("h3", {}, "Response"),
      h("div", { class: "prose" }, this.branches.length > 1 ? this.branches[this.shown].segments.map(({ text }) => text).join("") : this.trajectory.response),
      h("p", { class: "notice plain" }, icon("dots"), "The tokens of this step were not kept. telemetry.tokens_every_steps and telemetry.tokens_keep_steps select the steps."),
    );
  }
}
