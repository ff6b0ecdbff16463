// The head of the page: what was run, and how far it is.

const lastOf = (run, name) => run.history.tail[name];
const newestLaunch = (run) => run.launches[run.launches.length - 1];

// The best value of a metric of the dev split, and its step.
function bestOfDev(run, name) {
  const points = run.history.dev[name];
  if (!points) return null;
  const best = points.values.indexOf(Math.min(...points.values));
  return { value: points.values[best], step: points.steps[best], isLast: best === points.values.length - 1 };
}

function peakOf(run, name) {
  const curve = run.history.curves.metrics[name];
  if (!curve) return null;
  return Math.max(...(curve.high.length ? curve.high : curve.mean).filter(isNumber));
}

function stateOf(run) {
  const { last_step: reached } = run.history;
  if (!run.steps || reached >= run.steps) return "finished";
  return `${share(reached / run.steps)} of ${count(run.steps)}`;
}

// Rows of figures: name, value(run) and note(run).
const FIGURES = [
  ["Steps", (run) => count(run.history.last_step), stateOf],
  ["Loss", (run) => compact(lastOf(run, "loss")), (run) => `mean of the last ${count(Math.min(50, run.history.rows))} steps`],
  ["Dev loss", (run) => compact(bestOfDev(run, "loss")?.value), (run) => devNote(run, "loss")],
  ["Dev perplexity", (run) => compact(bestOfDev(run, "perplexity")?.value), (run) => devNote(run, "perplexity")],
  ["Throughput", (run) => `${large(lastOf(run, "tokens_per_second"))}`, () => "tokens per second, at the end"],
  ["Memory", (run) => bytes(peakOf(run, "peak_device_memory_bytes") ?? peakOf(run, "host_memory_bytes")), (run) => (peakOf(run, "peak_device_memory_bytes") ? "peak of a device" : "peak of the host's process")],
  ["Spikes", (run) => count(run.history.spikes.count), (run) => (run.params["trainer.spikes.policy"]?.includes("off") ?? true ? "not looked for" : "of loss or gradient norm")],
  ["Compiling", (run) => seconds(sum(run.programs.map((one) => one.tracing + one.lowering + one.compiling))), (run) => `${count(run.programs.length)} programs${run.recompilations.length ? `, ${count(run.recompilations.length)} in the middle of the run` : ""}`],
];

function devNote(run, name) {
  const best = bestOfDev(run, name);
  return best ? `the best, at step ${count(best.step)}` : "no dev split";
}

function factsOf(run) {
  const launch = newestLaunch(run);
  if (!launch) return [run.logdir];
  const { parameters, active_parameters: active } = launch;
  return [run.logdir, launch.devices, run.sharding?.strategy ? `strategy ${run.sharding.strategy}` : null,
    `${large(parameters)} parameters${active === parameters ? "" : `, ${large(active)} at work per token`}`, `started ${times(run.launches[0].time)}`].filter(Boolean);
}

function headline() {
  const experiments = [...new Set(runs.map((run) => run.experiment))].join(", ");
  const head = [el("p", { class: "eyebrow" }, isComparison ? `Report on ${runs.length} runs` : "Report on a run"), el("h1", {}, experiments)];
  if (!isComparison) {
    const [run] = runs;
    return el("header", {}, head, el("p", { class: "facts" }, factsOf(run).map((fact) => el("span", {}, breakable(fact)))), warnings(run),
      el("dl", { class: "figures" }, FIGURES.map(([name, value, note]) => el("div", {}, el("dt", {}, name), el("dd", {}, value(run), el("small", {}, note(run)))))));
  }
  return el("header", {}, head, runs.map(warnings), el("div", { class: "scroll" }, el("table", { id: "compared" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col", class: "plain" }, "Run"), FIGURES.map(([name]) => el("th", { scope: "col", class: "plain number" }, name)))),
    el("tbody", {}, runs.map((run, index) => el("tr", {}, el("th", { scope: "row", class: "plain" }, runName(index)), FIGURES.map(([, value, note]) => el("td", { class: "number", title: note(run) }, value(run)))))))));
}

function warnings(run) {
  const { not_finite: bad } = run.history;
  if (!bad.count) return null;
  return el("p", { class: "warning" }, `${run.label}: a metric was not finite in ${bad.count === 1 ? "step" : `${count(bad.count)} steps, first in step`} ${count(bad.steps[0])}.`);
}
