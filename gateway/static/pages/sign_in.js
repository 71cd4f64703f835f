// The sign-in page, which asks for the token.

import * as api from "../api.js";
import { h, replace } from "../dom.js";
import { icon } from "../icons.js";

/** Draw the page. `reason` explains why a new token is needed, if known. Calls `done` when a token was entered. */
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
    h("p", { class: "muted small" }, "The token is stored in this browser tab only, and sent only to this gateway."),
  );
  replace(main, form);
  field.focus();
}
