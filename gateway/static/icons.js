// Icons, as strokes on a 24 by 24 grid. Each is shown beside text or on a labelled button.

import { s } from "./dom.js";

const PATHS = {
  play: "M8 5.5v13l10.5-6.5z",
  pause: "M8.5 5.5v13M15.5 5.5v13",
  stop: "M6.5 6.5h11v11h-11z",
  check: "M5 12.5l4.5 4.5L19 7.5",
  cross: "M6.5 6.5l11 11M17.5 6.5l-11 11",
  circle: "M12 5a7 7 0 1 0 .01 0z",
  again: "M19 12a7 7 0 1 1-2.2-5.1M19 4.5v4.2h-4.2",
  dots: "M6 12h.01M12 12h.01M18 12h.01",
  warn: "M12 4.5l8.5 15h-17zM12 10.5v4M12 17h.01",
  save: "M6 5h10l3 3v11H6zM9 5v4.5h6V5M9 19v-5.5h7V19",
  sun: "M12 8a4 4 0 1 0 .01 0zM12 2.5v2M12 19.5v2M2.5 12h2M19.5 12h2M5.3 5.3l1.4 1.4M17.3 17.3l1.4 1.4M18.7 5.3l-1.4 1.4M6.7 17.3l-1.4 1.4",
  moon: "M19.5 14.5A8 8 0 0 1 9.5 4.5a8 8 0 1 0 10 10z",
  help: "M12 3.5a8.5 8.5 0 1 0 .01 0zM9.6 9.6a2.5 2.5 0 1 1 3.4 2.3c-.7.3-1 .8-1 1.6M12 16.5h.01",
  leave: "M14 5H6v14h8M11 12h9M17 8.5l3.5 3.5-3.5 3.5",
  plus: "M12 5.5v13M5.5 12h13",
  left: "M14.5 6l-6 6 6 6",
  right: "M9.5 6l6 6-6 6",
  chart: "M4.5 4.5v15h15M7.5 15l4-5 3 3 4.5-6.5",
  bars: "M4.5 6h9M8.5 12h11M6.5 18h8",
  text: "M5 6h14M5 10.5h14M5 15h9M5 19.5h6",
  scales: "M12 4.5v15M7 19.5h10M5 7.5h14M5 7.5l-2.5 6h5zM19 7.5l-2.5 6h5z",
  server: "M4.5 5h15v6h-15zM4.5 13.5h15v6h-15zM8 8h.01M8 16.5h.01",
  shield: "M12 3.5l7.5 2.8v5.2c0 4.5-3 7.6-7.5 9-4.5-1.4-7.5-4.5-7.5-9V6.3z",
  log: "M5 4.5h14v15H5zM8 9h8M8 12.5h8M8 16h4.5",
  sliders: "M5 7h8M17 7h2M15 5v4M5 12h2M11 12h8M9 10v4M5 17h6M15 17h4M13 15v4",
  lower: "M12 5.5v13M6.5 13l5.5 5.5 5.5-5.5",
  higher: "M12 18.5v-13M6.5 11L12 5.5l5.5 5.5",
};

/** Return an icon, hidden from screen readers. */
export function icon(name, size = 16) {
  return s(
    "svg",
    { viewBox: "0 0 24 24", width: size, height: size, class: "icon", "aria-hidden": "true", focusable: "false" },
    s("path", { d: PATHS[name] }),
  );
}
