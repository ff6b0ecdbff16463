// Heat maps of values around 1: how far each expert is from an even load.

const CELL_GAP = 1;
// A load of a quarter or less, and of four times or more, have the strongest colors.
const WIDEST = 2;

// Colors of a page in light or dark mode.
function mapColors() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  return { low: color("--low"), even: color("--even"), high: color("--high"), none: color("--none") };
}

function mixed(from, to, part) {
  const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const [a, b] = [channels(from), channels(to)];
  return `rgb(${a.map((value, index) => Math.round(value + (b[index] - value) * part)).join(" ")})`;
}

// The color of a load, of which 1 is even.
function loadColor(load, colors) {
  if (!isNumber(load)) return colors.even;
  if (load <= 0) return colors.none;
  const distance = Math.max(-WIDEST, Math.min(WIDEST, Math.log2(load))) / WIDEST;
  return mixed(colors.even, distance < 0 ? colors.low : colors.high, Math.abs(distance));
}

// options: {title, rows: names, columns: names, values: [row][column], rowWord, tell(row, column) -> text, note}
class HeatMap {
  constructor(options) {
    this.options = options;
    this.canvas = el("canvas", { tabindex: "0", role: "application", "aria-roledescription": "heat map", "aria-label": `${options.label}. Arrow keys go from cell to cell.` });
    this.frame = el("div", { class: "frame" }, this.canvas);
    this.readout = el("p", { class: "told", "aria-live": "polite" }, options.note);
    this.node = el("figure", { class: "chart small" },
      el("figcaption", {}, el("span", { class: "title" }, breakable(options.title)), options.unit ? el("span", { class: "unit" }, options.unit) : null),
      el("div", { class: options.names ? "named" : "" }, options.names ? el("div", { class: "rownames" }, options.names.map((name) => el("span", {}, name))) : null, this.frame),
      options.axis ? el("div", { class: "ends" }, options.axis.map((text) => el("span", {}, text))) : null, this.readout);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.readout.textContent = options.note; });
    this.canvas.addEventListener("keydown", (event) => this.pressed(event));
    new ResizeObserver(() => this.draw()).observe(this.frame);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  get cellHeight() {
    const rows = this.options.values.length;
    return this.options.names ? 20 : Math.max(2, Math.min(16, Math.floor(128 / rows)));
  }

  draw() {
    const width = this.frame.clientWidth;
    if (!width) return;
    const { values } = this.options;
    const [rows, columns] = [values.length, values[0].length];
    const height = rows * this.cellHeight;
    const sharp = window.devicePixelRatio || 1;
    Object.assign(this.canvas, { width: width * sharp, height: height * sharp });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    const context = this.canvas.getContext("2d");
    context.scale(sharp, sharp);
    const colors = mapColors();
    const gap = width / columns > 6 && this.cellHeight > 5 ? CELL_GAP : 0;
    values.forEach((row, y) => row.forEach((value, x) => {
      const [left, right] = [Math.round((x * width) / columns), Math.round(((x + 1) * width) / columns)];
      context.fillStyle = loadColor(value, colors);
      context.fillRect(left, y * this.cellHeight, right - left - gap, this.cellHeight - gap);
    }));
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / this.cellHeight);
    this.tell(row, Math.floor(((event.clientX - box.left) / box.width) * this.options.values[0].length));
  }

  // Arrow keys go from cell to cell.
  pressed(event) {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    const [row, column] = this.cell ?? [0, -1];
    this.tell(row + move[0], Math.max(0, column + move[1]));
    event.preventDefault();
  }

  tell(row, column) {
    if (!isNumber(this.options.values[row]?.[column])) return;
    this.cell = [row, column];
    this.readout.textContent = this.options.tell(row, column);
  }
}

// What the colors of a heat map mean.
function loadLegend() {
  const steps = [[0, "none"], [0.25, "¼"], [0.5, "½"], [1, "even"], [2, "2×"], [4, "4×"]];
  return el("div", { class: "loads" }, el("span", {}, "Share of the choices:"),
    steps.map(([load, text]) => el("span", {}, el("span", { class: `load load-${String(load).replace(".", "-")}`, "aria-hidden": "true" }), text)));
}
