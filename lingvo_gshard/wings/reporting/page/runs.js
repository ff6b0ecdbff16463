// The runs of the report: their colors, and what all charts show of them.

const { report } = JSON.parse(document.getElementById("data").textContent);
const { runs } = report;
const isComparison = runs.length > 1;

// Lines differ in color and in their dashes, since not everybody tells all colors apart.
const DASHES = ["", "8 3", "2 2.5", "10 3 2 3", "", "8 3", "2 2.5", "10 3 2 3"];
const runColor = (index) => `run-${index}`;
const firstStep = Math.min(...runs.map((run) => run.history.first_step));
const lastStep = Math.max(...runs.map((run) => run.history.last_step));

// The steps that all curves show, and the step that is pointed at.
const view = {
  from: firstStep,
  to: Math.max(lastStep, firstStep + 1),
  cursor: null,
  isSmooth: false,
  charts: new Set(),

  show(changes) {
    Object.assign(this, changes);
    this.charts.forEach((chart) => chart.draw());
  },

  point(step) {
    if (step === this.cursor) return;
    this.cursor = step;
    this.charts.forEach((chart) => chart.showCursor());
  },
};

// The name of a run with its color.
function runName(index) {
  return el("span", { class: "run" }, swatch(runColor(index)), runs[index].label);
}

// A choice between runs that have something; null if there is no choice.
function runSwitch(label, indices, chosen, onchange) {
  if (indices.length < 2) return null;
  return switchOf(label, indices.map((index) => [String(index), runs[index].label]), String(chosen), (value) => onchange(Number(value)));
}

// Splits a layer's metric, such as "encoder.layers[1].moe/dropped_share".
function layerAndMetric(name) {
  const at = name.lastIndexOf("/");
  return [name.slice(0, at), name.slice(at + 1)];
}

// Short names of layers: what all of them end with, after their number, is left out.
function shortLayers(layers) {
  const parts = layers.map((layer) => layer.split("."));
  let common = 0;
  const end = (part, place) => part[part.length - 1 - place];
  while (parts.length > 1 && parts.every((part) => part.length > common + 1 && end(part, common) === end(parts[0], common) && !end(part, common).includes("["))) common += 1;
  return parts.map((part) => part.slice(0, part.length - common).join(".").replace(".layers[", "["));
}

const words = (name) => name.replace(/_/g, " ").replace(/^./, (letter) => letter.toUpperCase());
const times = (text) => new Date(text * 1000).toISOString().replace("T", " ").slice(0, 16) + " UTC";
