// One trajectory: prompt, response token by token, where its reward came from, and its neighbours.

import { note } from "../address.js";
import * as api from "../api.js";
import { choice } from "../components/choice.js";
import { failure, loading } from "../components/states.js";
import { table } from "../components/table.js";
import { TokenView, tokenColumns } from "../components/token_view.js";
import { toast, toastProblem } from "../components/toast.js";
import { h, replace } from "../dom.js";
import { exact, number, whole } from "../format.js";
import { icon } from "../icons.js";
import { MEASURES, measuresOf } from "../token_scale.js";

/** Draws the page; `parts` are step, prompt and sample. */
export async function inspectorPage({ frame, run, element, parts, query, signal }) {
  replace(element, loading("400px"));
  const read = async () => {
    try {
      const found = await api.trajectory(run, parts.slice(0, 3).join("/"), signal);
      if (signal.aborted) return;
      document.title = `Step ${found.step}, prompt ${found.prompt_index} · ${run} · Quartet`;
      new Inspector({ frame, run, signal, found, colour: query.get("colour") }).draw(element);
    } catch (problem) {
      if (signal.aborted || problem.name === "AbortError") return;
      if (!(problem.status >= 0)) throw problem;
      replace(element, failure(problem, read), h("p", { class: "state" }, h("a", { href: frame.address("trajectories") }, "All trajectories")));
    }
  };
  await read();
}

class Inspector {
  constructor({ frame, run, signal, found, colour }) {
    Object.assign(this, { frame, run, signal, found });
    const measures = measuresOf(found.tokens);
    this.measures = measures;
    this.colour = measures.includes(colour) ? colour : measures[0];
    document.addEventListener("keydown", (event) => this.keyed(event), { signal });
  }

  draw(element) {
    const { found } = this;
    replace(
      element,
      this.head(),
      h(
        "div",
        { class: "stack" },
        this.figures(),
        h("section", { class: "panel padded stack" }, h("h3", {}, "Prompt"), h("div", { class: "prose prompt", tabindex: 0, role: "region", "aria-label": "Prompt" }, found.prompt)),
        found.tokens.length && this.colour ? this.tokens() : this.plainResponse(),
      ),
    );
  }

  head() {
    const { found } = this;
    const last = this.frame.detail.step;
    return h(
      "div",
      { class: "page-head" },
      h("h2", {}, `Step ${whole(found.step)}, prompt ${whole(found.prompt_index)}${found.sample ? `, sample ${found.sample}` : ""}`),
      h("a", { class: "small", href: this.frame.address("trajectories", { step: found.step }) }, "all of this step"),
      h(
        "div",
        { class: "end" },
        this.to(found.lower, "lower", "Lower reward"),
        this.to(found.higher, "higher", "Higher reward"),
        this.button("left", "Step before", found.step > 1, () => this.toStep(found.step - 1)),
        this.button("right", "Step after", found.step < last, () => this.toStep(found.step + 1)),
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

  /** The response of another step with the highest reward: its prompts are other ones. */
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
    const { found } = this;
    const act = {
      ArrowLeft: found.lower && (() => this.open(found.lower)),
      ArrowRight: found.higher && (() => this.open(found.higher)),
      "[": found.step > 1 && (() => this.toStep(found.step - 1)),
      "]": found.step < this.frame.detail.step && (() => this.toStep(found.step + 1)),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  figures() {
    const { found } = this;
    const pairs = [
      ["Reward", number(found.score)],
      ...Object.entries(found.parts).map(([name, value]) => [`of it ${name}`, number(value)]),
      ["KL, nats", number(found.kl)],
      ["KL coefficient", exact(found.kl_coefficient)],
      ["Tokens", whole(found.response_tokens)],
      ["Ended", found.finished ? "by itself" : "at the token limit"],
      ["Policy version", whole(found.policy_version)],
    ];
    return h("section", { class: "panel padded" }, h("dl", { class: "facts-row" }, pairs.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value)))));
  }

  tokens() {
    const view = new TokenView(this.found.tokens, this.colour);
    const pick = choice("Colour tokens by", this.measures.map((name) => [name, MEASURES[name].label]), this.colour, (name) => {
      this.colour = name;
      note({ colour: name });
      view.colourBy(name);
    });
    const rows = this.found.tokens.map((token, at) => ({ token, at }));
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
        h("h3", {}, "Every token in numbers"),
        table({ caption: "Tokens of the response", rows, columns: tokenColumns }),
      ),
    ];
  }

  plainResponse() {
    return h(
      "section",
      { class: "panel padded stack" },
      h("h3", {}, "Response"),
      h("div", { class: "prose" }, this.found.response),
      h("p", { class: "notice plain" }, icon("dots"), "This step's tokens were not kept: telemetry.tokens_every_steps and tokens_keep_steps say of which steps they are."),
    );
  }
}
