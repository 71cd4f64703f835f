// The right end of the top bar: theme, help, who one is, and leaving.

import { h, replace } from "./dom.js";
import { icon } from "./icons.js";
import { showHelp } from "./shortcuts.js";

/** Switches between dark and light and remembers it. Charts hear of it by `quartet:theme`. */
export function toggleTheme() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("quartet.theme", root.dataset.theme);
  window.dispatchEvent(new CustomEvent("quartet:theme"));
}

/** `session` is null before one has signed in. */
export function drawTools(session, leave) {
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
    session?.access === "viewer" ? h("span", { class: "pill", title: "This token may read, not command" }, "read only") : null,
    theme,
    h("button", { class: "button bare", type: "button", "aria-label": "Help and shortcuts", title: "Help (?)", onclick: showHelp }, icon("help", 18)),
    session
      ? h("button", { class: "button bare", type: "button", "aria-label": "Sign out", title: "Sign out", onclick: leave }, icon("leave", 18))
      : null,
  );
}

const CONNECTION = { live: "live", waiting: "connecting", gone: "connection lost" };

/** Says how the stream of live events is; null hides it. */
export function showConnection(state) {
  const element = document.getElementById("connection");
  if (!element) return;
  element.hidden = state === null;
  if (state === null) return;
  element.dataset.state = state;
  element.setAttribute("aria-label", `Live updates: ${CONNECTION[state]}`);
  element.firstElementChild.textContent = CONNECTION[state];
}
