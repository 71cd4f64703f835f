// The toolbar at the right end of the top bar: connection, access, theme, help and sign-out.

import { h, replace } from "./dom.js";
import { icon } from "./icons.js";
import { showShortcuts } from "./shortcuts.js";
import { toggleTheme } from "./theme_toggle.js";

/** Draw the toolbar. `session` is null before sign-in. */
export function drawToolbar(session, leave) {
  const theme = h("button", { class: "button bare", type: "button", onclick: toggleTheme });
  const drawTheme = () => {
    const dark = document.documentElement.dataset.theme === "dark";
    const label = dark ? "Use the light theme" : "Use the dark theme";
    theme.setAttribute("aria-label", label);
    theme.title = label;
    replace(theme, icon(dark ? "sun" : "moon", 18));
  };
  drawTheme();
  theme.addEventListener("click", drawTheme);
  window.addEventListener("quartet:theme", drawTheme);
  replace(
    document.getElementById("tools"),
    h("span", { id: "connection", class: "connection", role: "img", hidden: true }, h("span", {})),
    session?.access === "viewer" ? h("span", { class: "pill", title: "This token cannot send commands" }, "read only") : null,
    theme,
    h("button", { class: "button bare", type: "button", "aria-label": "Help and shortcuts", title: "Help (?)", onclick: showShortcuts }, icon("help", 18)),
    session && leave
      ? h("button", { class: "button bare", type: "button", "aria-label": "Sign out", title: "Sign out", onclick: leave }, icon("leave", 18))
      : null,
  );
}

const CONNECTION = { live: "live", waiting: "connecting", lost: "connection lost" };

/** Show the state of the event stream; null hides it. */
export function showConnection(state) {
  const element = document.getElementById("connection");
  if (!element) return;
  element.hidden = state === null;
  if (state === null) return;
  element.dataset.state = state;
  element.setAttribute("aria-label", `Live updates: ${CONNECTION[state]}`);
  element.firstElementChild.textContent = CONNECTION[state];
}
