// Where a run's weights and moments lie: bytes by layer, and tensors on the mesh.

const PARTS = [["weights", "class-weights"], ["moments", "class-moments"]];

function shardingSection() {
  const recorded = runs.map((_, index) => index).filter((index) => runs[index].sharding);
  if (!recorded.length) return section("sharding", "Memory and sharding", el("p", { class: "muted" }, "How weights lie on the devices was not recorded: the run was trained by an earlier version."));
  const widest = recorded.reduce((best, index) => (runs[index].sharding.devices > runs[best].sharding.devices ? index : best));
  const area = el("div", {});
  const draw = (index) => area.replaceChildren(...shardingOf(runs[index], report.layers[index]));
  draw(widest);
  const choice = runSwitch("Run whose sharding is shown", recorded, widest, draw);
  return section("sharding", "Memory and sharding", choice ? el("div", { class: "tools" }, choice) : null, area);
}

function shardingOf(run, layers) {
  const { sharding, mesh } = run;
  const held = sum(sharding.tensors.map((row) => row.bytes_per_device));
  const whole = sum(sharding.tensors.map((row) => row.bytes));
  const place = sharding.mesh ? `Mesh ${sharding.mesh}, strategy ${sharding.strategy}: each of the ${count(sharding.devices)} devices holds ${bytes(held)} of weights and moments, of ${bytes(whole)} in all (${share(held / whole)}; an even split is ${share(1 / sharding.devices)}).`
    : `One device holds ${bytes(held)} of weights and moments.`;
  return [el("p", { class: "lead" }, place), stepMemory(run), el("h3", {}, "Bytes of a layer on one device"), layerBars(layers),
    mesh ? tensorsOnMesh(sharding, mesh) : null].filter(Boolean);
}

// What the compiled step takes on one device, as XLA planned it.
function stepMemory(run) {
  const program = run.programs.findLast((one) => one.function === "train" && one.memory);
  if (!program) return null;
  const { arguments: given, temporaries, peak } = program.memory;
  const parts = [["arguments", given, "class-weights", "weights, moments and the batch"], ["temporaries", temporaries, "class-activations", "activations and what the step needs for a while"], ["outputs and code", peak - given - temporaries, "class-program", "the rest of the peak"]]
    .map(([name, value, color, about]) => ({ name, value, color, about })).filter((part) => part.value > 0);
  return el("div", { class: "step-memory" }, el("h3", {}, "Memory of the compiled step on one device"),
    el("p", { class: "lead" }, `XLA planned a peak of ${bytes(peak)}.`), stackedBar(parts, null, bytes, "Memory of the step"), legend(parts, bytes));
}

function layerBars(layers) {
  const most = Math.max(...layers.map((row) => row.weights + row.moments), 1);
  const items = layers.map((row) => el("li", {},
    el("span", { class: "name" }, breakable(row.layer)),
    explain(el("span", { class: "track" }, PARTS.map(([kind, color]) => el("span", { class: `length ${color}`, style: { width: `${(row[kind] / most) * 100}%` } }))),
      [row.layer, ...PARTS.map(([kind]) => `${kind} ${bytes(row[kind])}`), `${bytes(row.bytes)} on all devices together`]),
    el("span", { class: "amount" }, bytes(row.weights + row.moments))));
  const list = el("ul", { class: "layerbars" }, items.slice(0, ROWS_AT_FIRST));
  const rest = items.slice(ROWS_AT_FIRST);
  const button = rest.length ? el("button", { type: "button", class: "quiet", onclick: () => { list.append(...rest); button.remove(); } }, `Show all ${count(items.length)} layers`) : null;
  return el("div", {}, el("ul", { class: "legend" }, PARTS.map(([kind, color]) => el("li", {}, swatch(color), kind))), list, button);
}

function tensorsOnMesh(sharding, mesh) {
  const places = new Map(sharding.tensors.map((row, index) => [row, mesh.splits[index]]));
  const picture = el("div", { "aria-live": "polite" });
  const show = (row) => picture.replaceChildren(shardingPicture(row, places.get(row), mesh.axes));
  const size = (row) => [row.bytes > row.bytes_per_device ? 1 : 0, row.bytes];
  const first = sharding.tensors.reduce((best, row) => (!best || compareLists(size(row), size(best)) > 0 ? row : best), null);
  const columns = [
    field("Tensor", "path", { wide: true, show: (value) => el("span", {}, breakable(value)) }), field("Kind", "kind"), field("Layout", "layout", { show: code }),
    column("Shape", (row) => row.shape.reduce((product, length) => product * length, 1), { number: true, show: (_, row) => shape(row.shape) }),
    field("Type", "dtype"), field("Split", "split", { show: (value) => el("span", { class: "rules" }, value) }),
    numeric("Bytes", "bytes", bytes), numeric("Per device", "bytes_per_device", bytes, { bar: true }),
  ];
  if (sharding.devices === 1) return el("div", {}, el("h3", {}, "Weights and moments"), dataTable(columns, sharding.tensors, { id: "tensors", caption: "tensors", first: 7 }));
  show(first);
  return el("div", {}, el("h3", {}, "Weights and moments on the mesh"),
    el("p", { class: "lead" }, "Choose a tensor in the table to see which block of it each device holds."), picture,
    dataTable(columns, sharding.tensors, { id: "tensors", caption: "tensors", first: 7, choose: show, chosen: first }));
}

function compareLists(a, b) {
  const place = a.findIndex((value, index) => value !== b[index]);
  return place < 0 ? 0 : a[place] - b[place];
}
