// Routers: the load of each expert over the steps, and the metrics of each layer.

const ROUTER_METRICS = {
  load_max_over_mean: ["Fullest expert", "load of the fullest expert over the mean; 1 is even"],
  dropped_share: ["Dropped", "share of the choices that found their expert full"],
  router_entropy: ["Entropy", "of the router's probabilities, in nats"],
  dead_experts: ["Dead experts", "experts without a token in the step"],
  utilization: ["Utilization", "share of the capacity slots that hold a token"],
  auxiliary_loss: ["Balance loss", "with its weight, as it is added to the loss"],
};
const MOST_LAYERS = 12;

function routersSection() {
  const pictures = picturesOfRouters();
  const small = layerMetrics();
  if (!pictures && !small) return [];
  return [section("routers", "Routers", pictures ?? noPictures(), small)];
}

function noPictures() {
  return el("p", { class: "muted" }, "The load of each expert was not recorded. Routers are watched every trainer.routers.every_steps steps.");
}

function picturesOfRouters() {
  const watched = runs.map((run, index) => index).filter((index) => runs[index].routers.length);
  if (!watched.length) return null;
  const kinds = [["steps", "Over the steps"], ["by_language", "By language"], ["by_class", "By class of token"]];
  const state = { run: watched[0], kind: "steps" };
  const area = el("div", {});
  const draw = () => area.replaceChildren(routerMaps(runs[state.run].routers, state.kind));
  const has = ([kind]) => kind === "steps" || watched.some((index) => runs[index].routers.some((one) => one[kind].length));
  draw();
  return [
    el("div", { class: "tools" }, runSwitch("Run whose routers are shown", watched, state.run, (run) => { state.run = run; draw(); }),
      switchOf("What the rows are", kinds.filter(has), "steps", (kind) => { state.kind = kind; draw(); }), loadLegend()),
    area];
}

function routerMaps(pictures, kind) {
  const names = shortLayers(pictures.map((one) => one.layer));
  const maps = pictures.map((one, index) => (kind === "steps" ? mapOverSteps(one, names[index]) : mapByKind(one, names[index], kind))).filter(Boolean);
  const grid = el("div", { class: "multiples" }, maps.slice(0, MOST_LAYERS).map((map) => map.node));
  return withMore(grid, maps.slice(MOST_LAYERS).map((map) => map.node));
}

// A grid with a button that adds what is left out.
function withMore(grid, rest) {
  if (!rest.length) return grid;
  const button = el("button", { type: "button", class: "quiet", onclick: () => { grid.append(...rest); button.remove(); } }, `Show ${count(rest.length)} more layers`);
  return el("div", {}, grid, button);
}

function expertName(picture, row) {
  const first = row * picture.experts_in_row;
  const last = Math.min(picture.experts, first + picture.experts_in_row) - 1;
  return first === last ? `expert ${first}` : `experts ${first} to ${last}`;
}

function mapOverSteps(picture, title) {
  const steps = picture.steps;
  return new HeatMap({
    title, unit: `${count(picture.experts)} experts, one row each`.replace(", one row each", picture.experts_in_row > 1 ? `, ${picture.experts_in_row} to a row` : ", one row each"),
    values: picture.load, axis: [`step ${count(steps[0])}`, `step ${count(steps[steps.length - 1])}`],
    label: `${picture.layer}: load of ${picture.experts} experts over ${steps.length} watched steps`,
    note: `dropped ${share(picture.dropped_share[steps.length - 1])}, dead ${count(picture.dead[steps.length - 1])}`,
    tell: (row, column) => `step ${count(steps[column])}: ${expertName(picture, row)} has ${loadText(picture.load[row][column])}; dropped ${share(picture.dropped_share[column])}, entropy ${share(picture.load_entropy[column])} of even`,
  });
}

function mapByKind(picture, title, kind) {
  const rows = picture[kind];
  if (!rows.length) return null;
  return new HeatMap({
    title, unit: `${count(picture.experts)} experts, from left to right`, values: rows.map((row) => row.load), names: rows.map((row) => row.name),
    axis: [expertName(picture, 0), expertName(picture, rows[0].load.length - 1)],
    label: `${picture.layer}: load of ${picture.experts} experts by ${kind === "by_language" ? "language" : "class of token"}`,
    note: `the last watched steps, until step ${count(picture.steps[picture.steps.length - 1])}`,
    tell: (row, column) => `${rows[row].name}: ${expertName(picture, column)} has ${loadText(rows[row].load[column])}, of ${count(rows[row].tokens)} choices`,
  });
}

const loadText = (load) => (load > 0 ? `${compact(load)} times an even share` : "no token");

function layerMetrics() {
  const found = new Map();
  for (const run of runs) {
    for (const name of Object.keys(run.history.layers.metrics)) {
      const [layer, metric] = layerAndMetric(name);
      if (!found.has(metric)) found.set(metric, new Set());
      found.get(metric).add(layer);
    }
  }
  const known = Object.keys(ROUTER_METRICS).filter((metric) => found.has(metric));
  const metrics = [...known, ...[...found.keys()].filter((metric) => !known.includes(metric)).sort()];
  if (!metrics.length) return null;
  const [area, about] = [el("div", {}), el("span", { class: "hint" })];
  let drawn = [];
  const draw = (metric) => {
    drawn.forEach((chart) => view.charts.delete(chart));
    drawn = multiples(metric, [...found.get(metric)]);
    const nodes = drawn.map((chart) => chart.node);
    about.textContent = ROUTER_METRICS[metric]?.[1] ?? "";
    area.replaceChildren(withMore(el("div", { class: "multiples" }, nodes.slice(0, MOST_LAYERS)), nodes.slice(MOST_LAYERS)));
  };
  draw(metrics[0]);
  return el("div", { class: "layer-metrics" }, el("h3", {}, "Metrics of each layer"),
    el("div", { class: "tools" }, switchOf("Metric", metrics.map((metric) => [metric, ROUTER_METRICS[metric]?.[0] ?? words(metric)]), metrics[0], draw), about), area);
}

// A small chart for each layer, all with one scale.
function multiples(metric, layers) {
  const names = shortLayers(layers);
  const charts = [];
  const range = () => charts.flatMap((chart) => chart.values());
  const isShare = metric === "dropped_share" || metric === "utilization";
  layers.forEach((layer, place) => {
    const series = runs.flatMap((run, index) => {
      const { layers: curves } = run.history;
      const curve = curves.metrics[`${layer}/${metric}`];
      return curve ? [{ ...curve, first: curves.first, last: curves.last, until: run.history.last_step, label: isComparison ? run.label : "", color: runColor(index), dash: DASHES[index] }] : [];
    });
    charts.push(new LineChart(series, { title: names[place], height: 110, range, small: true, show: isShare ? share : compact, tick: isShare ? percentTick : compact, fromZero: metric !== "router_entropy" }));
  });
  return charts;
}
