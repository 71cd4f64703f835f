// Sets the theme before the page is drawn, so that it does not flash in the other theme.
"use strict";
(() => {
  const chosen = localStorage.getItem("quartet.theme");
  const dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = chosen === "dark" || chosen === "light" ? chosen : dark ? "dark" : "light";
})();
