// Sets the theme before anything is drawn, so that a page never flashes in the other one.
"use strict";
(() => {
  const chosen = localStorage.getItem("quartet.theme");
  const dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = chosen === "dark" || chosen === "light" ? chosen : dark ? "dark" : "light";
})();
