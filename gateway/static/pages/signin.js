// Asks for the token.

import * as api from "../api.js";
import { h, replace } from "../dom.js";
import { icon } from "../icons.js";

/** `reason`: why one has to, if it is not simply the first time. Calls `done` once there is a token. */
export function signInPage(main, reason, done) {
  const field = h("input", { id: "token", type: "password", autocomplete: "off", required: true, spellcheck: "false", autofocus: true });
  const form = h(
    "form",
    {
      class: "signin panel padded stack",
      onsubmit: (event) => {
        event.preventDefault();
        if (!field.value.trim()) return field.focus();
        api.setToken(field.value.trim());
        done();
      },
    },
    h("h1", {}, "Sign in to Quartet"),
    reason ? h("p", { class: "notice bad", role: "alert" }, icon("warn"), reason) : null,
    h("p", { class: "muted" }, "Open the link that Quartet printed when it started, or paste the token from it here."),
    h("div", { class: "field" }, h("label", { for: "token" }, "Token"), field),
    h("button", { class: "button primary", type: "submit" }, "Sign in"),
    h("p", { class: "muted small" }, "It is kept for this browser tab alone and goes nowhere but to this gateway."),
  );
  replace(main, form);
  field.focus();
}
