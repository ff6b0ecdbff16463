// Curves of the whole model.

const CHARTS = [
  { title: "Loss", names: ["loss"], scale: "auto", height: 260, isWide: true },
  { title: "Perplexity", names: ["perplexity"], scale: "auto" },
  { title: "Accuracy", names: ["accuracy"], show: share, fromZero: true },
  { title: "Gradient norm", names: ["gradient_norm"], scale: "auto", unit: "before clipping" },
  { title: "Learning rate", names: ["learning_rate"], fromZero: true },
  { title: "Throughput", names: ["tokens_per_second"], unit: "tokens per second", fromZero: true },
  { title: "Memory", names: ["peak_device_memory_bytes", "host_memory_bytes"], labels: ["fullest device, peak", "process on the host"], show: bytes, fromZero: true },
];
// Metrics that marks stand for, or that say nothing as a curve.
const NOT_DRAWN = new Set(["spike", "spikes"]);

function marksOf(run, index) {
  const color = isComparison ? runColor(index) : "";
  const of = isComparison ? `${run.label}: ` : "";
  const { spikes, not_finite: bad } = run.history;
  return [
    ...run.launches.filter((launch) => launch.step > 0).map((launch) => ({ step: launch.step, kind: "resumed", color, text: `${of}resumed after step ${count(launch.step)}` })),
    ...run.recompilations.map((one) => ({ step: one.step, kind: "compiled", color, text: `${of}compiled again in ${seconds(one.seconds)}: ${one.changes.join(", ") || "the same inputs"}` })),
    ...spikes.steps.map((step) => ({ step, kind: "spike", color, text: `${of}spike at step ${count(step)}` })),
    ...bad.steps.map((step) => ({ step, kind: "bad", color, text: `${of}not finite at step ${count(step)}` })),
  ];
}

const allMarks = runs.flatMap(marksOf);

// The series of a metric: of each run the training batches, and the dev split if it has the metric.
function seriesOf(names, labels = []) {
  return runs.flatMap((run, index) => names.flatMap((name, place) => {
    const { curves, dev } = run.history;
    const many = names.length > 1;
    const label = [isComparison ? run.label : null, labels[place] ?? (many ? words(name) : null)].filter(Boolean).join(", ") || "training";
    const color = isComparison ? runColor(index) : `run-${place}`;
    const dash = isComparison ? (many ? ["", "3 3"][place] : DASHES[index]) : DASHES[place];
    const found = [];
    const curve = curves.metrics[name];
    if (curve) found.push({ ...curve, first: curves.first, last: curves.last, label, color, dash });
    const points = dev[name];
    if (points) found.push({ first: points.steps, last: points.steps, mean: points.values, low: [], high: [], dots: true,
      label: isComparison ? `${run.label}, dev` : "dev", color: isComparison ? runColor(index) : "run-1", dash: isComparison ? "3 3" : "" });
    return found;
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
    others.length ? el("details", {}, el("summary", {}, `${count(others.length)} more metrics: ${others.map((name) => words(name).toLowerCase()).join(", ")}`),
      el("div", { class: "charts" }, others.map((name) => chartOf({ title: words(name), names: [name], scale: "auto" }).node))) : null);
}

// The controls of all curves, and what marks mean.
function curveTools() {
  const length = lastStep - firstStep;
  const parts = [["all", "All steps", 1], ["half", "Second half", 0.5], ["tenth", "Last tenth", 0.1]];
  const kinds = Object.keys(MARKS).filter((kind) => allMarks.some((mark) => mark.kind === kind));
  const many = runs.some((run) => run.history.curves.metrics.loss?.low.length);
  return el("div", { class: "tools sticky" },
    length > 20 ? switchOf("Steps that are shown", parts.map(([value, text]) => [value, text]), "all", (chosen) => {
      const [, , part] = parts.find(([value]) => value === chosen);
      view.show({ from: Math.round(lastStep - length * part), to: lastStep });
    }) : null,
    length > 20 ? switchOf("How curves are drawn", [["raw", "Raw"], ["smooth", "Smoothed"]], "raw", (value) => view.show({ isSmooth: value === "smooth" })) : null,
    isComparison ? el("ul", { class: "legend" }, runs.map((run, index) => el("li", {}, lineSample({ color: runColor(index), dash: DASHES[index] }), run.label))) : null,
    kinds.length ? el("ul", { class: "legend" }, kinds.map((kind) => el("li", {}, svg("svg", { class: `mark ${kind}`, width: 12, height: 12, viewBox: "-6 -10.5 12 12", "aria-hidden": "true" }, svg("path", { d: MARKS[kind].path })), MARKS[kind].name))) : null,
    many ? el("span", { class: "hint" }, "A line is the mean of some steps; the shade reaches from the smallest to the largest value.") : null);
}
