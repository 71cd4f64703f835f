// The charts of a run's metrics, from the gateway's definitions of the metrics.

import { colourName } from "../charts.js";
import { exact, percent, seconds } from "../format.js";

/** Units of values whose axis begins at 0. */
const FROM_ZERO = /^(share|tokens|nats|seconds)/;

/** Return how values of a unit are written, on the axis too. */
export function formatOf(unit) {
  if (unit.startsWith("share")) return { format: percent, ticks: ".0%" };
  return unit === "seconds" ? { format: seconds } : {};
}

/** Return the charts of metrics by title: {title, unit, about, names, series, lines(data), ...}; `names` are the metrics that they need. */
export function chartsBy(definitions) {
  const groups = new Map();
  for (const definition of definitions) groups.set(definition.chart, [...(groups.get(definition.chart) ?? []), definition]);
  return [...groups].map(([title, metrics], at) => {
    const { unit } = metrics[0];
    const names = metrics.map(({ name }) => name);
    return {
      title,
      unit: unit === "reward" ? "" : unit,
      about: metrics.map(({ label, meaning, healthy }) => `${label}: ${meaning} Healthy: ${healthy}.`).join("\n"),
      names,
      series: metrics.map(({ label }, index) => ({ label, colour: colourName(metrics.length > 1 ? index : at) })),
      lines: (data) => names.map((name) => (name.startsWith("validation_") ? data.points(name) : data.line(name))),
      zero: FROM_ZERO.test(unit),
      ...formatOf(unit),
    };
  });
}

/** Return the definitions that charts show of the metrics in `names`, with the names of sets and parts filled in. */
export function definitionsOf(definitions, names) {
  return definitions.filter(({ chart }) => chart).flatMap((definition) => {
    if (!definition.name.includes("NAME")) return names.includes(definition.name) ? [definition] : [];
    const pattern = new RegExp(`^${definition.name.replace(/K$/, "(?<K>\\d+)").replace("NAME", "(?<NAME>.+)")}$`);
    return names.flatMap((name) => {
      const values = pattern.exec(name)?.groups;
      const filled = (text) => text.replace(/\b(NAME|K)\b/g, (word) => values[word] ?? word);
      return values ? [{ ...definition, name, label: filled(definition.label), meaning: filled(definition.meaning) }] : [];
    });
  });
}

/** Return the charts of a run's steps. They depend on its KL target, its reward parts, and on whether it has scores, a teacher and a critic. */
export function chartsOf(definitions, detail) {
  const has = detail.metric_names ?? [];
  const needed = ({ name, needs }) => (detail.has_stage ? needs === "stage" && (!has.length || has.includes(name)) : !needs || detail[`has_${needs}`]);
  const shown = definitions.filter((definition) => definition.chart && !definition.name.startsWith("eval_") && needed(definition));
  const filled = shown.flatMap((definition) => {
    const { name, label } = definition;
    const parts = name.includes("NAME") ? (detail.reward_parts ?? []) : [""];
    return parts.map((part) => ({ ...definition, name: name.replace("NAME", part), label: label.replace("NAME", part) }));
  });
  return chartsBy(filled).flatMap((chart) => {
    if (chart.names[0] === "reward_mean") return withBand(chart);
    if (chart.names[0] === "kl_mean" && detail.kl_target) return withLevel(chart, detail.kl_target);
    return chart.names[0] === "seconds" ? [THROUGHPUT, chart] : chart;
  });
}

const THROUGHPUT = {
  title: "Throughput",
  unit: "response tokens/s",
  names: ["response_tokens", "seconds"],
  zero: true,
  series: [{ label: "tokens/s", colour: "green" }],
  lines: (data) => [data.combined("response_tokens", "seconds", (tokens, time) => (time > 0 ? tokens / time : null))],
};

/** Return the names of the metrics that charts need, without duplicates. */
export const namesOf = (charts) => [...new Set(charts.flatMap((chart) => chart.names))];

/** Return one chart for each metric of `names` that `charts` do not show. */
export function furtherCharts(definitions, names, charts) {
  const shown = new Set(["step", ...namesOf(charts)]);
  const further = names.filter((name) => !shown.has(name)).map((name) => {
    const known = definitions.find((definition) => definition.name === name);
    return { label: name, unit: "", meaning: "not described.", healthy: "unknown", ...known, name, chart: name.replaceAll("_", " ") };
  });
  return chartsBy(further);
}

function withBand(chart) {
  const band = (data) => {
    const line = data.line("reward_mean");
    if (!line) return null;
    const below = data.combined("reward_mean", "reward_std", (mean, spread) => mean - spread);
    const above = data.combined("reward_mean", "reward_std", (mean, spread) => mean + spread);
    const whole = below && below.x.length === line.x.length;
    return whole ? { ...line, low: below.y, high: above.y } : line;
  };
  const area = { label: "± standard deviation", colour: chart.series[0].colour, area: true, always: true, unlisted: true };
  return { ...chart, main: 0, names: ["reward_mean", "reward_std"], series: [...chart.series, area], lines: (data) => [band(data)] };
}

function withLevel(chart, value) {
  const level = (line) => line && { x: [line.x[0], line.x.at(-1)], y: [value, value], low: null, high: null, constant: true };
  const target = { label: `target ${exact(value)}`, colour: "green", dashed: true, always: true };
  return { ...chart, main: 0, series: [...chart.series, target], lines: (data) => [data.line("kl_mean"), level(data.line("kl_mean"))] };
}
