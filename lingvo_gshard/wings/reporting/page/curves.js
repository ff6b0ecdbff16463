// Curves of the whole model.

const CHARTS = [
  { title: "Loss", names: ["loss"], scale: "auto", height: 260, isWide: true },
  { title: "Perplexity", names: ["perplexity"], scale: "auto" },
  { title: "Accuracy", names: ["accuracy"], show: share, tick: percentTick, fromZero: true },
  { title: "Gradient norm", names: ["gradient_norm"], scale: "auto", unit: "before clipping" },
  { title: "Learning rate", names: ["learning_rate"], fromZero: true },
  { title: "Throughput", names: ["tokens_per_second"], unit: "tokens per second", fromZero: true },
  { title: "Memory", names: ["peak_device_memory_bytes", "host_memory_bytes"], labels: ["fullest device, peak", "process on the host"], show: bytes, base: 1024, fromZero: true },
];
// Metrics that marks stand for, or that say nothing as a curve.
const NOT_DRAWN = new Set(["spike", "spikes", "batch_digest"]);

function marksOf(run, index) {
  const color = isComparison ? runColor(index) : "";
  const of = isComparison ? `${run.label}: ` : "";
  const { spikes, not_finite: bad } = run.history;
  return [
    ...run.launches.filter((launch) => launch.step > 0).map((launch) => ({ step: launch.step, kind: "resumed", color, text: `${of}resumed after step ${count(launch.step)}` })),
    ...run.recompilations.map((one) => ({ step: one.step, kind: "compiled", color, text: `${of}compiled again in ${seconds(one.seconds)}: ${one.changes.join(", ") || "the same inputs"}` })),
    ...run.roll_backs.map((one) => ({ step: one.last_step, kind: "back", color, text: `${of}rolled back from step ${count(one.step)} to step ${count(one.last_step)}; skipped batches ${count(one.first_batch)} to ${count(one.last_batch)}` })),
    ...spikes.steps.map((step) => ({ step, kind: "spike", color, text: `${of}spike at step ${count(step)}` })),
    ...bad.steps.map((step) => ({ step, kind: "bad", color, text: `${of}not finite at step ${count(step)}` })),
  ];
}

const allMarks = runs.flatMap(marksOf);

// The series of metrics: of each run the training batches, and the dev split if it has the metric.
function seriesOf(names, labels = []) {
  const present = names.filter((name) => runs.some((run) => run.history.curves.metrics[name]));
  return runs.flatMap((run, index) => present.flatMap((name, place) => {
    const { curves, dev, last_step: until } = run.history;
    const part = labels[names.indexOf(name)] ?? null;
    const of = (what) => [isComparison ? run.label : null, what].filter(Boolean).join(", ");
    const color = runColor(isComparison ? index : place);
    const dash = isComparison ? (place ? "3 3" : DASHES[index]) : DASHES[place];
    const curve = curves.metrics[name];
    const points = dev[name];
    return [
      curve ? { ...curve, first: curves.first, last: curves.last, until, label: of(part ?? (points ? "training" : null)), color, dash } : null,
      points ? { first: points.steps, last: points.steps, until, mean: points.values, low: [], high: [], dots: true, label: of("dev"), color: isComparison ? color : runColor(1), dash: isComparison ? "3 3" : "" } : null,
    ].filter(Boolean);
  }));
}

function chartOf({ names, labels, isWide, ...options }) {
  const chart = new LineChart(seriesOf(names, labels), { ...options, marks: allMarks });
  if (isWide) chart.node.classList.add("wide");
  return chart;
}

function curvesSection() {
  const drawn = CHARTS.filter(({ names }) => names.some((name) => runs.some((run) => run.history.curves.metrics[name])));
  const known = new Set(CHARTS.flatMap(({ names }) => names));
  const others = [...new Set(runs.flatMap((run) => Object.keys(run.history.curves.metrics)))].filter((name) => !known.has(name) && !NOT_DRAWN.has(name)).sort();
  return section("curves", "Curves", curveTools(),
    el("div", { class: "charts" }, drawn.map((options) => chartOf(options).node)),
    others.length ? el("details", {}, el("summary", {}, `${others.length === 1 ? "One more metric" : `${count(others.length)} more metrics`}: ${others.map((name) => words(name).toLowerCase()).join(", ")}`),
      el("div", { class: "charts" }, others.map((name) => chartOf({ title: words(name), names: [name], scale: "auto" }).node))) : null);
}

// The controls of all curves, and what marks mean.
function curveTools() {
  const length = lastStep - firstStep;
  const parts = [["all", "All steps", 1], ["half", "Second half", 0.5], ["tenth", "Last tenth", 0.1]];
  const kinds = Object.keys(MARKS).filter((kind) => allMarks.some((mark) => mark.kind === kind));
  const many = runs.some((run) => run.history.curves.metrics.loss?.low.length);
  return el("div", { class: "tools" },
    length > 20 ? switchOf("Steps that are shown", parts.map(([value, text]) => [value, text]), "all", (chosen) => {
      const [, , part] = parts.find(([value]) => value === chosen);
      view.show({ from: Math.round(lastStep - length * part), to: lastStep });
    }) : null,
    length > 20 ? switchOf("How curves are drawn", [["raw", "Raw"], ["smooth", "Smoothed"]], "raw", (value) => view.show({ isSmooth: value === "smooth" })) : null,
    isComparison ? el("ul", { class: "legend" }, runs.map((run, index) => el("li", {}, lineSample({ color: runColor(index), dash: DASHES[index] }), run.label))) : null,
    kinds.length ? el("ul", { class: "legend" }, kinds.map((kind) => el("li", {}, svg("svg", { class: `mark ${kind}`, width: 12, height: 12, viewBox: "-6 -10.5 12 12", "aria-hidden": "true" }, svg("path", { d: MARKS[kind].path })), MARKS[kind].name))) : null,
    many ? el("span", { class: "hint" }, "A line is the mean of some steps; the shade reaches from the smallest to the largest value.") : null);
}
