// The charts of a run's metrics, shared by the overview and the comparison.

import { exact, percent, seconds } from "../format.js";

/** Define a chart: `names` are the metrics that it needs; `lines(data)` returns its series in order. */
const plain = (title, unit, names, rest = {}) => ({
  title,
  unit,
  names: names.map(([name]) => name),
  series: names.map(([, label, colour]) => ({ label, colour })),
  lines: (data) => names.map(([name]) => data.line(name)),
  ...rest,
});

const REWARD = {
  title: "Reward",
  names: ["reward_mean", "reward_std"],
  main: 0,
  series: [
    { label: "mean over the step's responses", colour: "blue" },
    { label: "± standard deviation", colour: "blue", area: true, always: true, unlisted: true },
  ],
  lines: (data) => [withBand(data)],
};

const PART_COLOURS = ["blue", "orange", "green", "pink", "yellow", "grey"];

/** Return the charts of an ensemble's parts: their scores, and their weights, which can change. */
function partCharts(parts) {
  if (!parts.length) return [];
  const series = (suffix) => parts.map((part, index) => [`reward_${part}_${suffix}`, part, PART_COLOURS[index % PART_COLOURS.length]]);
  return [
    plain("Reward parts", "unweighted", series("mean")),
    plain("Reward weights", "0 is a shadow", series("weight"), { zero: true }),
  ];
}

/** Return the charts of a run. They depend on its KL target, its reward parts, and on whether it has scores, a teacher and a critic. */
export function chartsOf(detail) {
  return [
    ...(detail.has_scores ? [REWARD] : []),
    ...partCharts(detail.reward_parts ?? []),
    ...(detail.has_teacher ? [plain("KL to the teacher", "nats per token", [["teacher_kl", "reverse KL", "blue"]], { zero: true })] : []),
    {
      title: "KL to the reference",
      unit: "nats per response",
      names: ["kl_mean"],
      main: 0,
      zero: true,
      series: [
        { label: "mean", colour: "orange" },
        ...(detail.kl_target ? [{ label: `target ${exact(detail.kl_target)}`, colour: "green", dashed: true, always: true }] : []),
      ],
      lines: (data) => [data.line("kl_mean"), ...(detail.kl_target ? [level(data, "kl_mean", detail.kl_target)] : [])],
    },
    plain("Response length", "tokens", [["response_tokens_mean", "mean", "green"]], { zero: true }),
    plain("Entropy", "nats per token", [["entropy", "entropy", "pink"]], { zero: true }),
    plain("Policy loss", "", [["policy_loss", "policy loss", "blue"]]),
    ...(detail.has_critic ? [plain("Value loss", "", [["value_loss", "value loss", "orange"]], { zero: true })] : []),
    {
      title: "Throughput",
      unit: "response tokens/s",
      names: ["response_tokens", "seconds"],
      zero: true,
      series: [{ label: "tokens/s", colour: "green" }],
      lines: (data) => [data.combined("response_tokens", "seconds", (tokens, time) => (time > 0 ? tokens / time : null))],
    },
    plain("Step time", "", [
      ["seconds", "total", "grey"],
      ["generate_seconds", "generate", "blue"],
      ["score_seconds", "score", "green"],
      ["update_seconds", "update", "orange"],
    ], { zero: true, format: seconds }),
    plain("Finished responses", "fraction with an end token", [["eos_rate", "finished", "blue"]], { zero: true, format: percent, ticks: ".0%" }),
    plain("Gradient norms", "before clipping", [
      ["grad_norm_actor", "actor", "blue"],
      ...(detail.has_critic ? [["grad_norm_critic", "critic", "orange"]] : []),
    ], { zero: true }),
    plain("Clip fraction", "fraction of tokens", [["clip_fraction", "clip fraction", "pink"]], { zero: true, format: percent, ticks: ".0%" }),
    plain("Approximate KL", "between old and new policy, nats per token", [["approx_kl", "approximate KL", "orange"]]),
    plain("Correction for the engine", "effective sample size, and tokens outside the bounds", [
      ["importance_ess", "effective sample size", "blue"],
      ["importance_truncated_fraction", "truncated", "orange"],
      ["importance_masked_fraction", "masked", "pink"],
      ["rejected_fraction", "rejected", "yellow"],
      ["off_policy_masked_fraction", "off-policy", "grey"],
    ], { zero: true, format: percent, ticks: ".0%" }),
    ...(detail.has_critic ? [plain("Explained variance", "of returns by the critic", [["explained_variance", "explained variance", "green"]])] : []),
    plain("KL coefficient", "β", [["kl_coefficient", "β", "grey"]]),
    plain("Learning rate", "", [
      ["learning_rate_actor", "actor", "blue"],
      ...(detail.has_critic ? [["learning_rate_critic", "critic", "orange"]] : []),
    ]),
    plain("Repetition", "fraction of 3-grams", [["repetition", "repetition", "yellow"]], { zero: true, format: percent, ticks: ".0%" }),
  ];
}

/** Return the names of the metrics that charts need, without duplicates. */
export const namesOf = (charts) => [...new Set(charts.flatMap((chart) => chart.names))];

function withBand(data) {
  const line = data.line("reward_mean");
  if (!line) return null;
  const below = data.combined("reward_mean", "reward_std", (mean, spread) => mean - spread);
  const above = data.combined("reward_mean", "reward_std", (mean, spread) => mean + spread);
  const whole = below && below.x.length === line.x.length;
  return whole ? { ...line, low: below.y, high: above.y } : line;
}

function level(data, name, value) {
  const line = data.line(name);
  if (!line) return null;
  const ends = [line.x[0], line.x.at(-1)];
  return { x: ends, y: [value, value], low: null, high: null, constant: true };
}
