// The interface to plotly: layout, colours of both themes, and drawing.

const COLOURS = ["blue", "orange", "green", "pink", "yellow", "grey"];
const CONFIG = { displayModeBar: false, responsive: false, doubleClick: false, showTips: false };

let cached = null;

window.addEventListener("quartet:theme", () => {
  cached = null;
});

/** Return the colours of the current theme, by their names in base.css. */
export function colours() {
  if (!cached) {
    const style = getComputedStyle(document.documentElement);
    const names = [...COLOURS, "text", "muted", "line", "panel", "warn", "bad", "good", "accent"];
    cached = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }
  return cached;
}

/** Return the colour name of the series with this index. */
export const colourName = (index) => COLOURS[index % COLOURS.length];

/** Return a colour, given as #rrggbb, with an opacity from 0 to 1. */
export function faded(colour, opacity) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return `rgba(${red}, ${green}, ${blue}, ${opacity})`;
}

/** Return the layout of a line chart; `range` is [first step, last step]. */
export function lineLayout({ range, marks = [], zero = false, ticks = "", zoom = true }) {
  const colour = colours();
  const axis = { gridcolor: colour.line, linecolor: colour.line, zeroline: false, tickfont: { color: colour.muted, size: 11 }, automargin: false };
  return {
    margin: { l: 48, r: 8, t: 6, b: 22 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 11, color: colour.muted },
    showlegend: false,
    hovermode: false,
    dragmode: zoom && matchMedia("(pointer: fine)").matches ? "zoom" : false,
    xaxis: { ...axis, range, showgrid: false, nticks: 6, tickformat: ",d", fixedrange: !zoom },
    yaxis: {
      ...axis,
      tickformat: ticks,
      rangemode: zero ? "tozero" : "normal",
      nticks: 5,
      fixedrange: true,
      zeroline: true,
      zerolinecolor: colour.line,
      zerolinewidth: 1.5,
    },
    shapes: marks.map(({ step, tone, dash }) => ({
      type: "line",
      x0: step,
      x1: step,
      yref: "paper",
      y0: 0,
      y1: 1,
      line: { color: colour[tone], width: 1.2, dash: dash ?? "dot" },
    })),
  };
}

/** Return the traces of one line, preceded by its band if it has one. */
export function lineTraces({ x, y, low, high, colour, dashed, label }) {
  const shade = colours()[colour];
  const traces = [];
  if (low && high) {
    const edge = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", type: "scatter", connectgaps: false };
    traces.push({ ...edge, y: low }, { ...edge, y: high, fill: "tonexty", fillcolor: faded(shade, 0.17) });
  }
  traces.push({
    x,
    y,
    type: "scatter",
    mode: x.length === 1 ? "markers" : "lines",
    name: label,
    line: { color: shade, width: dashed ? 1.5 : 1.8, dash: dashed ? "dash" : "solid" },
    marker: { color: shade, size: 6 },
  });
  return traces;
}

/** Draw or redraw a chart. Raises Error if plotly cannot be loaded. */
export async function draw(element, traces, layout) {
  await ready();
  if (!element.isConnected || !element.clientWidth) return;
  const size = { width: element.clientWidth, height: element.clientHeight };
  await window.Plotly.react(element, traces, { ...layout, ...size }, CONFIG);
}

/** Return the step at a horizontal position in pixels from the chart's left edge; null outside the axes. */
export function stepAt(element, pixels) {
  const axis = element._fullLayout?.xaxis;
  if (!axis || pixels < axis._offset - 4 || pixels > axis._offset + axis._length + 4) return null;
  return axis.p2d(pixels - axis._offset);
}

/** Return the horizontal position of a step in pixels from the chart's left edge; null outside the axes. */
export function pixelOf(element, step) {
  const axis = element._fullLayout?.xaxis;
  if (!axis) return null;
  const position = axis.d2p(step);
  return position < -1 || position > axis._length + 1 ? null : position + axis._offset;
}

/** Release plotly's resources of a chart. */
export function release(element) {
  window.Plotly?.purge(element);
}

let loading = null;

/** Load plotly once, on demand, because it is large. Rejects if it cannot be loaded. */
export function ready() {
  // A report contains plotly.
  if (window.Plotly) return Promise.resolve();
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "/static/plotly.min.js";
    script.onload = resolve;
    script.onerror = () => {
      loading = null;
      script.remove();
      reject(new Error("The chart library could not be loaded."));
    };
    document.head.append(script);
  });
  return loading;
}
