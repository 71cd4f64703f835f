// Switch between the dark and the light theme.

/** Switch the theme and remember it. Dispatch `quartet:theme`, on which charts are redrawn. */
export function toggleTheme() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("quartet.theme", root.dataset.theme);
  window.dispatchEvent(new CustomEvent("quartet:theme"));
}
