// The sections of the page.

const CLASSES = [
  ["weights", "the model's parameters"],
  ["moments", "the optimizer's state"],
  ["activations", "activations and temporaries"],
  ["inputs", "the batch"],
  ["program", "the compiled step itself"],
];

const phaseCell = (value) => el("span", { class: "phase" }, swatch(phaseColour({ phase: value })), value);

function headline(given) {
  const memory = given.bytes_per_device;
  const room = memory.capacity - memory.peak;
  const facts = [`${given.topology}`, `${count(given.devices)} devices`, given.chip, `mesh ${given.mesh || MISSING}`,
    `strategy ${given.strategy_name || MISSING}`, given.partitioner].filter(Boolean);
  return el("header", {},
    el("p", { class: "eyebrow" }, "Plan of a training step"),
    el("h1", {}, given.name),
    el("p", { class: "facts" }, facts.map((fact) => el("span", {}, fact))),
    given.compiler === "cpu" ? el("p", { class: "estimate" }, "Compiled for CPU devices, not for this chip: memory and communication are an estimate.") : null,
    el("div", { class: `verdict ${given.fits ? "fits" : "over"}` },
      el("span", { class: "mark", "aria-hidden": "true" }, given.fits ? "✓" : "✕"),
      el("div", {},
        el("p", { class: "answer" }, given.fits ? "It fits" : "It does not fit"),
        el("p", {}, `Peak ${bytes(memory.peak)} of ${bytes(memory.capacity)} usable per device (${share(memory.peak / memory.capacity)}); `,
          room >= 0 ? `${bytes(room)} to spare.` : `${bytes(-room)} too much.`))),
    el("dl", { class: "figures" }, figures(given)));
}

function figures(given) {
  const budget = given.budget;
  const rows = [
    ["Steps per second", digitsOr(given.steps_per_second), `at most ${digitsOr(given.steps_per_second_bound)} (bound)`],
    ["Time of a step", seconds(given.seconds_per_step), `at least ${seconds(given.seconds_per_step_bound)} (bound)`],
    ["Tokens per second", large(given.tokens_per_second), `${large(given.tokens_per_step)} per step`],
    ["MFU", share(given.mfu), "useful FLOPs of the chips' peak"],
    ["Parameters", large(given.parameters.total), `${large(given.parameters.active)} at work per token`],
  ];
  if (budget) {
    rows.push(["Chip-hours", large(budget.chip_hours), `for ${large(budget.tokens)} tokens`]);
    if (isNumber(budget.kilowatt_hours)) rows.push(["Energy", `${large(budget.kilowatt_hours)} kWh`, "of the chips"]);
    if (isNumber(budget.price)) rows.push(["Price", money(budget.price, budget.currency), `for ${large(budget.tokens)} tokens`]);
  }
  const whole = given.goodput;
  if (whole) {
    rows.push(["Goodput", share(whole.goodput.mean), `a failure every ${digits(whole.between_failures / 3600)} hours`]);
    rows.push(["Days", digits(whole.days.mean), `${digits(whole.days.low)} to ${digits(whole.days.high)} in 90% of simulated runs`]);
  }
  const loads = given.loads;
  if (loads) {
    const dropped = loads.dropped_share ? `, ${share(loads.dropped_share.p90)} of the requests dropped` : "";
    rows.push(["Time under loads", seconds(loads.step_seconds.p90), `at most, in 90% of ${digits(loads.steps)} steps of ${loads.path}${dropped}`]);
  }
  return rows.map(([name, value, note]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, el("small", {}, note))));
}

const digitsOr = (value) => (isNumber(value) ? digits(value) : MISSING);

function memorySection(given) {
  const memory = given.bytes_per_device;
  const parts = CLASSES.map(([name, about]) => ({ name, about, value: memory[name], color: `class-${name}` }));
  const rest = memory.peak - sum(parts.map((part) => part.value));
  if (rest > 0) parts.push({ name: "not told apart", about: "of the peak, in none of these classes", value: rest, color: "class-rest" });
  const note = rest < 0 ? "The classes come to more than the peak: not all of them are held at the same moment." : null;
  return section("memory", "Memory of one device",
    stackedBar(parts, { name: "capacity", value: memory.capacity }, bytes, "Memory of one device"),
    el("p", { class: "capacity", style: { marginRight: `${(1 - memory.capacity / Math.max(memory.capacity, sum(parts.map((part) => part.value)))) * 100}%` } }, `capacity ${bytes(memory.capacity)}`),
    legend(parts, bytes, memory.capacity), note ? el("p", { class: "muted" }, note) : null);
}

const TIME_NOTES = {
  estimate: "The estimate takes the efficiencies that were measured. Communication counts as long as no computation hides it.",
  bound: "The bound takes the published peak rates, and lets all communication run beside all the rest: no step can be faster.",
};

function timeSection(given) {
  const line = new TimeLine(given.layers, given.collectives, "estimate");
  const key = el("div", {});
  const explainKey = (mode) => key.replaceChildren(legend(PHASES.map((phase) => ({
    name: phase, color: `phase-${phase}`, value: sum(given.layers.filter((row) => phaseOf(row) === phase).map((row) => timeOf(row, mode))),
  })).filter((part) => part.value > 0), seconds));
  const note = el("p", { class: "muted" });
  const choose = (mode) => {
    line.setMode(mode);
    explainKey(mode);
    note.textContent = TIME_NOTES[mode];
  };
  choose("estimate");
  const button = (text, label, onclick) => el("button", { type: "button", "aria-label": label, title: label, onclick }, text);
  return section("time", "Time line of a step",
    el("div", { class: "tools" },
      switchOf("Which time is drawn", [["estimate", "Estimate"], ["bound", "Bound"]], "estimate", choose),
      el("div", { class: "switch", role: "group", "aria-label": "Zoom" },
        button("−", "Zoom out", () => line.zoom(1 / 0.6)), button("+", "Zoom in", () => line.zoom(0.6)), button("All", "Show all", () => line.zoom(Infinity))),
      el("span", { class: "muted hint" }, "Ctrl and wheel zooms, dragging moves; hatched is bound by memory")),
    line.node, key, note);
}

function arithmeticSection(given) {
  const { useful, executed, rematerialized, dispatch, optimizer = 0, padding } = given.flops;
  const parts = [
    ["useful", useful, "flop-useful", "what the model's definition asks for"],
    ["rematerialized", rematerialized, "flop-rematerialized", "computed again in the backward pass to save memory"],
    ["dispatch", dispatch, "flop-dispatch", "matrix products that move tokens to experts and back"],
    ["optimizer", optimizer, "flop-optimizer", "matrix products of the optimizer, as Muon has them"],
    ["padding", padding, "flop-padding", "on elements that only fill up shapes"],
  ].map(([name, value, color, about]) => ({ name, value, color, about }));
  const rest = executed - sum(parts.map((part) => part.value));
  if (rest > executed * 1e-6) parts.push({ name: "other", value: rest, color: "flop-other", about: "executed, and none of these" });
  const ratio = executed > 0 ? `${share(useful / executed)} of what is executed is useful.` : "";
  return section("arithmetic", "Arithmetic of one device in one step",
    el("p", { class: "lead" }, `${flops(executed)} in matrix products. ${ratio}`),
    stackedBar(parts, null, flops, "Arithmetic"), legend(parts.filter((part) => part.value > 0), flops));
}

function communicationSection(given) {
  const rows = given.collectives;
  if (!rows.length) return section("communication", "Communication", el("p", {}, "The step has no collectives."));
  const groups = new Map();
  for (const row of rows) {
    const name = `${row.kind} over ${row.axis}`;
    const group = groups.get(name) || { name, value: 0, calls: 0, bytes: 0 };
    group.value += row.seconds || 0;
    group.calls += row.count || 0;
    group.bytes += (row.bytes || 0) * (row.count || 0);
    groups.set(name, group);
  }
  const bars = [...groups.values()].sort((a, b) => b.value - a.value)
    .map((group) => ({ ...group, note: `${count(group.calls)} calls, ${bytes(group.bytes)} per device` }));
  const columns = [
    field("Collective", "kind"), field("Axis", "axis"), field("Layer", "layer", { wide: true, show: code }),
    field("Phase", "phase", { show: phaseCell }), field("Type", "dtype"),
    numeric("Bytes of a call", "bytes", bytes), numeric("Calls", "count", count),
    numeric("Bound", "seconds_bound", seconds), numeric("Hidden", "hidden_seconds", seconds), numeric("Exposed", "seconds", seconds, { bar: true }), numeric("Share", "share", share),
    field("Line", "line", { wide: true, show: code }),
  ];
  return section("communication", "Communication of a step",
    el("p", { class: "lead" }, `${seconds(sum(rows.map((row) => row.seconds)))} in ${count(sum(rows.map((row) => row.count)))} collectives that no computation hides, and ${seconds(sum(rows.map((row) => row.hidden_seconds)))} hidden (estimate).`),
    barList(bars, seconds, "Collectives by kind and axis"),
    dataTable(columns, rows, { id: "collectives", caption: "collectives", first: 8 }));
}

function shardingSection(given, placed) {
  const places = new Map(given.tensors.map((row, index) => [row, placed.splits[index]]));
  const picture = el("div", { "aria-live": "polite" });
  const show = (row) => picture.replaceChildren(shardingPicture(row, places.get(row), placed.axes));
  const largest = given.tensors.reduce((best, row) => (!best || row.bytes > best.bytes ? row : best), null);
  if (!largest) return section("sharding", "Weights and moments on the mesh", el("p", {}, "The step keeps no tensors."));
  show(largest);
  const columns = [
    field("Tensor", "path", { wide: true, show: (value) => el("span", {}, breakable(value)) }), field("Kind", "kind"), field("Layout", "layout", { show: code }),
    column("Shape", (row) => (row.shape || []).reduce((product, size) => product * size, 1), { number: true, show: (_, row) => shape(row.shape) }),
    field("Type", "dtype"), field("Split", "split", { show: (value) => el("span", { class: "rules" }, value || "replicated") }),
    numeric("Bytes", "bytes", bytes), numeric("Per device", "bytes_per_device", bytes, { bar: true }),
  ];
  return section("sharding", "Weights and moments on the mesh",
    el("p", { class: "lead" }, "Choose a tensor in the table to see which block of it each device holds."), picture,
    dataTable(columns, given.tensors, { id: "tensors", caption: "tensors", first: 7, choose: show, chosen: largest }));
}

function layersSection(given) {
  const columns = [
    numeric("No.", "number", count), field("Layer", "layer", { wide: true, show: code }), field("Phase", "phase", { show: phaseCell }),
    numeric("Times", "times", count), numeric("Estimate", "seconds", seconds, { bar: true }), numeric("Bound", "seconds_bound", seconds),
    numeric("Compute", "compute_seconds", seconds, { title: "bound of arithmetic" }),
    numeric("Memory", "memory_seconds", seconds, { title: "bound of reading and writing memory" }),
    numeric("Network", "communication_seconds", seconds, { title: "bound of communication between devices" }),
    numeric("FLOPs", "flops", flops), numeric("Traffic", "bytes", bytes, { title: "bytes read from and written to memory" }),
  ];
  const rows = given.layers.map((row, index) => ({ number: index + 1, ...row }));
  return section("layers", "Layers",
    el("p", { class: "lead" }, "Of one device, all executions of a step together; numbered in order of execution. Compute, memory and network are bounds of a layer's parts."),
    dataTable(columns, rows, { id: "layer-table", caption: "layers", first: 4 }));
}

function temporariesSection(given) {
  const columns = [
    field("Temporary", "name", { wide: true, show: code }), field("Layer", "layer", { wide: true, show: code }),
    field("Shape", "shape", { show: (_, row) => shape(row.shape) }), field("Type", "dtype"), numeric("Bytes", "bytes", bytes, { bar: true }),
  ];
  if (!given.largest_temporaries.length) return section("temporaries", "Largest temporaries", el("p", {}, "There are none."));
  return section("temporaries", "Largest temporaries",
    dataTable(columns, given.largest_temporaries, { id: "temporaries-table", caption: "largest temporaries", first: 4 }));
}

function remediesSection(given) {
  const rows = given.remedies || [];
  if (!rows.length) return [];
  const columns = [
    field("Change", "change", { wide: true, show: code }),
    column("Fits", (row) => (row.fits ? "yes" : "no"), { show: (value, row) => el("span", { class: row.fits ? "good" : "bad" }, row.fits ? "✓ yes" : "✕ no") }),
    numeric("Peak per device", "peak", bytes, { bar: true }), numeric("Time of a step", "seconds_per_step", seconds),
    numeric("Tokens a second", "tokens_per_second", large), numeric("Price of 1e9 tokens, USD", "price", large),
  ];
  return [section("remedies", "What would fit",
    el("p", { class: "lead" }, "Each change was compiled."),
    dataTable(columns, rows, { id: "remedies-table", caption: "remedies" }))];
}

function notesSection(given) {
  const versions = Object.entries(given.versions).map(([name, version]) => ({ name, version: version === null ? null : String(version) }));
  const sources = [given.budget?.sources || []].flat().map((source) => (typeof source === "string" ? source : JSON.stringify(source)));
  const notes = [...(given.notes || []), ...sources.map((source) => `Budget: ${source}`)];
  return section("notes", "Notes and versions",
    notes.length ? el("ul", { class: "notes" }, notes.map((note) => el("li", {}, note))) : null,
    el("dl", { class: "facts-list" },
      el("dt", {}, "Strategy"), el("dd", {}, code(given.strategy || given.strategy_name)),
      el("dt", {}, "Compiled in"), el("dd", {}, seconds(given.compile_seconds)),
      el("dt", {}, "Compiler"), el("dd", {}, given.compiler || MISSING)),
    dataTable([field("Package", "name"), field("Version", "version", { show: code })], versions, { id: "versions", caption: "versions" }));
}
