// Commands to a run. Each asks for confirmation and shows the result.

import * as api from "../api.js";
import { h, replace } from "../dom.js";
import { icon } from "../icons.js";
import { confirm } from "./dialog.js";
import { toast, toastProblem } from "./toast.js";

const COMMANDS = {
  pause: {
    label: "Pause",
    shape: "pause",
    title: "Pause the run?",
    text: "The current step completes and is committed; then the run pauses. Nothing is lost, and the services stay up.",
  },
  resume: { label: "Resume", shape: "play", title: "Resume the run?", text: "Training continues with the next step." },
  checkpoint: {
    label: "Checkpoint",
    shape: "save",
    title: "Save a checkpoint?",
    text: "It is saved after the current step, in addition to the scheduled checkpoints.",
  },
  stop: {
    label: "Stop",
    shape: "stop",
    title: "Stop the run?",
    text: "The current step completes and the policy is saved; then the run ends. Continue it with quartet train --resume.",
    danger: true,
  },
};

export class RunControls {
  constructor(frame) {
    this.frame = frame;
    this.element = h("div", { class: "run-controls", role: "group", "aria-label": "Run controls" });
    this.draw();
  }

  draw() {
    const { detail, mayCommand } = this.frame;
    const verbs = mayCommand && detail.live ? [detail.state === "paused" ? "resume" : "pause", "checkpoint", "stop"] : [];
    const key = verbs.join();
    if (key === this.shown) return;
    this.shown = key;
    const focused = this.element.contains(document.activeElement) ? document.activeElement.dataset.at : null;
    replace(
      this.element,
      verbs.map((verb, at) =>
        h(
          "button",
          { class: "button", type: "button", "data-verb": verb, "data-at": at, onclick: () => this.send(verb) },
          icon(COMMANDS[verb].shape),
          COMMANDS[verb].label,
        ),
      ),
    );
    if (focused !== null) this.element.querySelector(`[data-at="${focused}"]`)?.focus();
  }

  /** Ask for confirmation, then send a command. */
  async send(verb) {
    const { label, title, text, danger } = COMMANDS[verb];
    if (!(await confirm(title, [h("p", {}, text)], { verb: label, danger }))) return;
    try {
      const { detail } = await api.command(this.frame.run, verb);
      toast(detail);
    } catch (problem) {
      toastProblem(problem);
    }
  }

  /** Handle the key `p`. */
  pauseOrResume() {
    const { detail, mayCommand } = this.frame;
    if (mayCommand && detail.live) this.send(detail.state === "paused" ? "resume" : "pause");
  }
}
