// Draws which shard of a tensor each device of the mesh holds.

const MOST_DEVICES = 64;

// The indices of an axis that are drawn; null marks a gap.
function shownIndices(size, most) {
  const all = Array.from({ length: size }, (_, index) => index);
  return size <= most ? all : [...all.slice(0, most - 2), null, size - 1];
}

// Start and end of one device's shard in every dimension.
function blockOf(tensor, split, sizes, coordinates) {
  return tensor.shape.map((size, dimension) => {
    let index = 0;
    let parts = 1;
    for (const axis of split[dimension]) {
      index = index * sizes[axis] + coordinates[axis];
      parts *= sizes[axis];
    }
    const length = Math.ceil(size / parts);
    return { letter: (tensor.layout || "")[dimension] || `dimension ${dimension}`, size, parts,
      start: Math.min(size, index * length), end: Math.min(size, (index + 1) * length) };
  });
}

function rangeText(part) {
  if (part.parts === 1) return `all of ${part.letter}`;
  if (part.end <= part.start) return `${part.letter}: only padding`;
  return part.end - part.start === 1 ? `${part.letter} ${count(part.start)}` : `${part.letter} ${count(part.start)} to ${count(part.end - 1)}`;
}

function shortRange(part) {
  if (part.end <= part.start) return `${part.letter} –`;
  return part.end - part.start === 1 ? `${part.letter} ${part.start}` : `${part.letter} ${part.start}–${part.end - 1}`;
}

// A tensor as a rectangle with the device's shard filled in: the first sharded dimension runs from
// top to bottom, the second from left to right.
function miniature(block) {
  const [width, height, least] = [46, 28, 2.5];
  const cut = block.filter((part) => part.parts > 1);
  const span = (part, room) => {
    if (!part) return [0, room];
    const length = Math.max(least, ((part.end - part.start) / part.size) * room);
    return [Math.min(room - length, (part.start / part.size) * room), length];
  };
  const [y, tall] = span(cut[0], height);
  const [x, wide] = span(cut[1], width);
  return svg("svg", { width: width + 2, height: height + 2, viewBox: `-1 -1 ${width + 2} ${height + 2}`, "aria-hidden": "true" },
    svg("rect", { class: "tensor", x: 0, y: 0, width, height, rx: 2 }),
    svg("rect", { class: "held", x, y, width: wide, height: tall, rx: 1 }));
}

function deviceCell(tensor, split, axes, indices) {
  const sizes = Object.fromEntries(axes);
  const coordinates = Object.fromEntries(axes.map(([name], position) => [name, indices[position]]));
  const number = axes.reduce((index, [name, size]) => index * size + coordinates[name], 0);
  const block = blockOf(tensor, split, sizes, coordinates);
  const cut = block.filter((part) => part.parts > 1);
  const lines = [`device ${number}`, axes.map(([name]) => `${name} ${coordinates[name]}`).join(", "),
    ...(cut.length ? block.map(rangeText) : ["the whole tensor"]), bytes(tensor.bytes_per_device)];
  const key = cut.map((part) => part.start).join(" ");
  const cell = el("div", { class: "device", role: "listitem", "data-block": key, "aria-label": lines.join(", ") },
    miniature(block), el("div", { class: "id" }, number),
    cut.slice(0, 2).map((part) => el("div", { class: "range" }, shortRange(part))));
  cell.addEventListener("mouseenter", () => twins(cell, true));
  cell.addEventListener("mouseleave", () => twins(cell, false));
  return explain(cell, lines);
}

// Devices that hold the same shard.
function twins(cell, on) {
  for (const other of cell.closest(".mesh").querySelectorAll(".device")) {
    other.classList.toggle("same", on && other.dataset.block === cell.dataset.block);
  }
}

const leftOut = (text) => el("div", { class: "leftout", "aria-hidden": "true" }, text);

function row1d(tensor, split, axes) {
  const [[name, size]] = axes;
  const shown = shownIndices(size, size <= MOST_DEVICES ? size : 24);
  return el("figure", {}, el("figcaption", {}, `${name} →`),
    el("div", { class: "grid wrap", role: "list" }, shown.map((index) =>
      (index === null ? leftOut("…") : deviceCell(tensor, split, axes, [index])))));
}

function grid2d(tensor, split, axes, outer, caption, most) {
  const [[rowName, rows], [columnName, columns]] = axes.slice(-2);
  const [down, across] = [shownIndices(rows, most), shownIndices(columns, most)];
  const cells = down.flatMap((row) => across.map((column) => {
    if (row === null || column === null) return leftOut(row === null ? (column === null ? "⋱" : "⋮") : "…");
    return deviceCell(tensor, split, axes, [...outer, row, column]);
  }));
  return el("figure", {}, el("figcaption", {}, `${caption}${rowName} ↓   ${columnName} →`),
    el("div", { class: "grid", role: "list", style: { gridTemplateColumns: `repeat(${across.length}, max-content)` } }, cells));
}

function outerIndices(axes) {
  const size = axes.reduce((product, [, length]) => product * length, 1);
  return shownIndices(size, 3).map((flat) => {
    if (flat === null) return null;
    let rest = flat;
    return axes.map(([, length]) => length).reverse().map((length) => {
      const index = rest % length;
      rest = Math.floor(rest / length);
      return index;
    }).reverse();
  });
}

function devicesPicture(tensor, split, axes) {
  const devices = axes.reduce((product, [, size]) => product * size, 1);
  if (axes.length === 1) return [row1d(tensor, split, axes)];
  const few = devices <= MOST_DEVICES;
  if (axes.length === 2) return [grid2d(tensor, split, axes, [], "", few ? MOST_DEVICES : 8)];
  const outer = axes.slice(0, -2);
  return outerIndices(outer).map((indices) => (indices === null ? leftOut("…")
    : grid2d(tensor, split, axes, indices, `${outer.map(([name], position) => `${name} ${indices[position]}`).join(", ")}:  `, few ? 8 : 4)));
}

function shardingPicture(tensor, split, axes) {
  const sizes = Object.fromEntries(axes);
  const devices = axes.reduce((product, [, size]) => product * size, 1);
  const about = el("div", { class: "about" }, el("h3", {}, tensor.path),
    el("p", { class: "muted" }, `${tensor.kind}, ${tensor.dtype}, ${bytes(tensor.bytes)} in total, ${bytes(tensor.bytes_per_device)} on each device`));
  if (!Array.isArray(split)) {
    about.append(el("p", {}, `This cannot be drawn: ${split}.`));
    return el("div", { class: "mesh" }, about);
  }
  const parts = split.map((names) => names.reduce((product, name) => product * sizes[name], 1));
  const blocks = parts.reduce((product, part) => product * part, 1);
  about.append(
    el("ul", { class: "dimensions" }, tensor.shape.map((size, dimension) =>
      el("li", { class: parts[dimension] > 1 ? "cut" : null },
        el("b", {}, (tensor.layout || "")[dimension] || "·"), ` ${count(size)} `,
        el("span", { class: "muted" }, parts[dimension] > 1 ? `${count(parts[dimension])} parts of ${count(Math.ceil(size / parts[dimension]))} over ${split[dimension].join(", ")}` : "not split")))),
    el("p", {}, blocks > 1 ? `${count(blocks)} blocks, each on ${count(devices / blocks)} ${devices === blocks ? "device" : "devices"}.` : `Every one of the ${count(devices)} devices holds all of it.`));
  const drawn = devicesPicture(tensor, split, axes);
  const abbreviated = devices > MOST_DEVICES ? el("p", { class: "muted" }, `${count(devices)} devices; only some are drawn.`) : null;
  return el("div", { class: "mesh" }, about, el("div", { class: "devices" }, drawn, abbreviated));
}
