// Where the time of profiled steps went, and what a plan had predicted.

// The colors of the parts of a step, in the order of the profile's tables.
const STEP_PARTS = {
  products: "run-0", attention: "run-3", "routing and dispatch": "run-1", collectives: "run-5", optimizer: "run-2", "other computation": "run-4",
  "other programs": "run-7", "between operations": "run-7", "input wait": "run-6", host: "run-7",
};
const partColor = (name) => STEP_PARTS[name] || "run-7";

function profileSection() {
  const profiled = runs.flatMap((run, index) => run.profiles.map((one) => ({ ...one, run: index })));
  if (!profiled.length) return [];
  const area = el("div", {});
  const draw = (one) => area.replaceChildren(...profileOf(one));
  const name = (one) => [isComparison ? runs[one.run].label : null, `steps ${count(one.profile.first_step)} to ${count(one.profile.last_step)}`].filter(Boolean).join(", ");
  const newest = profiled.length - 1;
  const choice = newest ? switchOf("Profile", profiled.map((one, place) => [String(place), name(one)]), String(newest), (value) => draw(profiled[Number(value)])) : null;
  draw(profiled[newest]);
  return [section("profile", "Time of a step", choice ? el("div", { class: "tools" }, choice) : null, area)];
}

function profileOf({ profile, comparison, path }) {
  const parts = profile.parts.map((row) => ({ name: row.part, value: row.seconds, color: partColor(row.part), about: row.flops_per_second ? `${flops(row.flops_per_second)}/s` : null }));
  const rate = profile.useful_flops / profile.seconds_per_step;
  const reached = profile.attainable ? `, ${share(rate / profile.attainable.flops_per_second)} of the ${flops(profile.attainable.flops_per_second)}/s that large products reach` : "";
  return [
    el("p", { class: "lead" }, `${seconds(profile.seconds_per_step)} per step, profiled in steps ${count(profile.first_step)} to ${count(profile.last_step)} on ${profile.device_summary}: ${flops(rate)}/s of useful work${reached}.`),
    stackedBar(parts, null, seconds, "Time of a step by kind of work"), legend(parts, seconds),
    profile.findings.length ? el("ul", { class: "notes" }, profile.findings.map((text) => el("li", {}, text))) : null,
    comparison ? planAgainstProfile(comparison) : null,
    el("h3", {}, "Slowest operations"), slowestTable(profile),
    profile.collectives.length ? el("h3", {}, "Collectives") : null, profile.collectives.length ? collectivesTable(profile) : null,
    el("h3", {}, "Layers"), comparison ? comparedLayers(comparison) : profiledLayers(profile),
    el("p", { class: "muted after" }, "The traces for XProf and Perfetto are in ", el("code", {}, breakable(path)), "."),
  ].filter(Boolean);
}

// Two bars for each kind of work: predicted and measured.
function planAgainstProfile(comparison) {
  const most = Math.max(...comparison.kinds.flatMap((row) => [row.predicted, row.measured])) || 1;
  const bar = (kind, value) => el("div", { class: "scorebar timed" }, el("div", { class: "track" }, el("div", { class: `length ${kind}`, style: { width: `${(value / most) * 100}%` } })), el("b", {}, seconds(value)));
  return el("div", {}, el("h3", {}, "Plan against profile"),
    el("p", { class: "lead" }, `The plan predicted ${seconds(comparison.predicted)} per step; ${seconds(comparison.measured)} were measured, ${compact(comparison.measured / comparison.predicted)} times as much. A plan knows neither pauses nor the host.`),
    el("ul", { class: "legend" }, [["planned", "predicted"], ["run-0", "measured"]].map(([color, name]) => el("li", {}, swatch(color), name))),
    el("ul", { class: "languages kinds" }, comparison.kinds.map((row) => el("li", {}, el("span", { class: "name" }, row.part, el("small", {}, ratioText(row))),
      el("div", { class: "bars" }, bar("planned", row.predicted), bar("run-0", row.measured))))));
}

function ratioText({ predicted, measured }) {
  if (!predicted || !measured) return predicted ? "not measured" : "not in the plan";
  return Math.abs(measured / predicted - 1) < 0.05 ? "as planned" : `${compact(measured / predicted)} times the plan`;
}

function slowestTable(profile) {
  const columns = [
    field("Operation", "name", { wide: true, show: code }), field("Kind", "kind"), field("Layer", "layer", { wide: true, show: code }), field("Phase", "phase"),
    numeric("Seconds", "seconds", seconds, { bar: true }), column("Share", (row) => row.seconds / profile.seconds_per_step, { number: true, show: share }),
    numeric("Executions", "executions", count), field("Source", "source", { show: code }),
  ];
  return dataTable(columns, profile.slowest, { id: "slowest", caption: "slowest operations", first: 4 });
}

function collectivesTable(profile) {
  const columns = [
    field("Collective", "kind"), field("Axis", "axis"), numeric("Count", "count", count), numeric("Bytes", "bytes", bytes),
    numeric("Seconds", "seconds", seconds, { bar: true }), numeric("Hidden", "hidden_seconds", seconds, { title: "while the device computed" }),
    numeric("Exposed", "exposed_seconds", seconds, { title: "while the device did nothing else" }),
  ];
  return dataTable(columns, profile.collectives, { id: "profiled-collectives", caption: "collectives", first: 4 });
}

const layerColumns = () => [field("Layer", "layer", { wide: true, show: code }), field("Phase", "phase")];

function profiledLayers(profile) {
  const columns = [...layerColumns(), numeric("Seconds", "seconds", seconds, { bar: true }), numeric("Share", "share", share), numeric("FLOPs", "flops", flops)];
  return dataTable(columns, profile.layers, { id: "profiled-layers", caption: "layers", first: 2 });
}

function comparedLayers(comparison) {
  const rows = comparison.layers.map((row) => ({ ...row, layer: row.part, ratio: row.predicted ? row.measured / row.predicted : null }));
  const columns = [...layerColumns(), numeric("Measured", "measured", seconds, { bar: true }), numeric("Predicted", "predicted", seconds), numeric("Measured / predicted", "ratio", compact)];
  return dataTable(columns, rows, { id: "profiled-layers", caption: "layers", first: 2 });
}
