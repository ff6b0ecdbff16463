// Curves over the steps of a run. All of them show the same steps and share one cursor.

const TOP = 14;
const BOTTOM = 24;
const MARKS = {
  spike: { name: "spike", path: "M-4.5,-8 L4.5,-8 L0,0 Z" },
  compiled: { name: "compiled again", path: "M0,-9 L4.5,-4.5 L0,0 L-4.5,-4.5 Z" },
  resumed: { name: "resumed", path: "M-3,-9 L4.5,-4.5 L-3,0 Z" },
  back: { name: "rolled back", path: "M3,-9 L-4.5,-4.5 L3,0 Z" },
  bad: { name: "not finite", path: "M-4,-8 L4,0 M4,-8 L-4,0" },
};
const MOST_LINES = 24;
// From this ratio of the largest value to the median, an axis is logarithmic at first.
const WIDE_RANGE = 8;

// series: {label, color, dash, first, last, mean, low, high, dots}; marks: {step, kind, text, color}
// options: {title, unit, show, tick, base, scale: "linear", "log" or "auto", fromZero, height, marks,
//   range, small}
class LineChart {
  constructor(series, options) {
    this.series = series.filter((one) => one.mean.some(isNumber));
    this.options = { scale: "linear", height: 190, marks: [], show: compact, ...options };
    this.isLog = this.options.scale === "log" || (this.options.scale === "auto" && this.hasWideRange());
    this.canvas = svg("svg", { class: "curve", tabindex: "0", role: "application", "aria-roledescription": "curve" });
    this.plot = svg("g");
    this.pointer = svg("g", { class: "pointer" });
    this.canvas.append(this.plot, this.pointer);
    this.frame = el("div", { class: "frame" }, this.canvas);
    this.readout = el("ul", { class: "readout" });
    this.node = el("figure", { class: `chart${this.options.small ? " small" : ""}` }, this.caption(), this.frame, this.readout);
    this.listen();
    view.charts.add(this);
    new ResizeObserver(() => this.draw()).observe(this.frame);
  }

  caption() {
    const { title, unit, scale } = this.options;
    const toggle = scale === "linear" || !this.isPositive() ? null : switchOf(`Scale of ${title}`, [["linear", "linear"], ["log", "log"]], this.isLog ? "log" : "linear", (value) => {
      this.isLog = value === "log";
      this.draw();
    });
    return el("figcaption", {}, el("span", { class: "title" }, title), unit ? el("span", { class: "unit" }, unit) : null, toggle);
  }

  values(all) {
    const found = [];
    for (const one of this.series) {
      const lists = one.low?.length ? [one.mean, one.low, one.high] : [one.mean];
      one.mean.forEach((_, index) => {
        if (all || (one.last[index] >= view.from && one.first[index] <= view.to)) lists.forEach((list) => isNumber(list[index]) && found.push(list[index]));
      });
    }
    return found;
  }

  isPositive() {
    return this.values(true).every((value) => value > 0);
  }

  hasWideRange() {
    const sorted = this.values(true).sort((a, b) => a - b);
    if (!sorted.length || sorted[0] <= 0) return false;
    return sorted[sorted.length - 1] / sorted[Math.floor(sorted.length / 2)] > WIDE_RANGE;
  }

  draw() {
    const width = this.frame.clientWidth;
    if (!width) return;
    const { height, show, fromZero, range, base, tick = show } = this.options;
    const values = range ? range() : this.values();
    const isLog = this.isLog && values.every((value) => value > 0);
    const y = valueScale(values, height - BOTTOM, TOP, isLog, fromZero);
    const rows = y.ticks(Math.max(2, Math.floor((height - TOP - BOTTOM) / 34)), base);
    const labels = rows.map((value) => tick(value));
    const left = 12 + Math.max(...labels.map((label) => label.length), 4) * 6.4;
    this.x = new Scale(view.from, view.to, left, width - 10);
    this.y = y;
    this.canvas.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.canvas.setAttribute("width", width);
    this.canvas.setAttribute("height", height);
    const clip = `clip-${[...view.charts].indexOf(this)}`;
    this.plot.replaceChildren(
      svg("clipPath", { id: clip }, svg("rect", { x: left, y: 0, width: Math.max(0, width - 10 - left + 5), height: height - BOTTOM + 4 })),
      ...rows.map((value, index) => svg("g", { class: "row" }, svg("line", { x1: left, x2: width - 10, y1: y.at(value), y2: y.at(value) }), svg("text", { x: left - 7, y: y.at(value) + 4, "text-anchor": "end" }, labels[index]))),
      ...this.stepAxis(width, height, left),
      svg("g", { "clip-path": `url(#${clip})` }, this.series.map((one) => this.curve(one))),
      ...this.marks(height),
    );
    this.showCursor();
  }

  stepAxis(width, height, left) {
    const found = linearTicks(view.from, view.to, Math.max(2, Math.floor(width / 70))).filter(Number.isInteger);
    const name = svg("text", { x: left - 7, y: height - 6, "text-anchor": "end" }, "step");
    return [name, ...found.map((step) => {
      const [x, half] = [this.x.at(step), stepTick(step).length * 3.1];
      return svg("g", { class: "column" }, svg("line", { x1: x, x2: x, y1: height - BOTTOM, y2: height - BOTTOM + 4 }),
        svg("text", { x: Math.max(left + half, Math.min(x, width - 6 - half)), y: height - 6, "text-anchor": "middle" }, stepTick(step)));
    })];
  }

  middle(one, index) {
    return this.x.at((one.first[index] + one.last[index]) / 2);
  }

  line(one, values) {
    let path = "";
    let isOpen = false;
    values.forEach((value, index) => {
      if (!isNumber(value)) { isOpen = false; return; }
      path += `${isOpen ? "L" : "M"}${this.middle(one, index).toFixed(1)},${this.y.at(value).toFixed(1)}`;
      isOpen = true;
    });
    return path;
  }

  // The area between the smallest and the largest value of each interval.
  band(one) {
    const pieces = [];
    let piece = [];
    const end = () => { if (piece.length) pieces.push(piece); piece = []; };
    one.mean.forEach((_, index) => (isNumber(one.low[index]) ? piece.push(index) : end()));
    end();
    const at = (index, list) => `${this.middle(one, index).toFixed(1)},${this.y.at(list[index]).toFixed(1)}`;
    return pieces.map((indices) => `M${indices.map((index) => at(index, one.high)).join("L")}L${[...indices].reverse().map((index) => at(index, one.low)).join("L")}Z`).join("");
  }

  curve(one) {
    const strong = one.dots || !view.isSmooth ? one.mean : smoothed(one.mean);
    return svg("g", { class: `series ${one.color}` },
      one.low?.length ? svg("path", { class: "band", d: this.band(one) }) : null,
      strong === one.mean ? null : svg("path", { class: "line faint", d: this.line(one, one.mean) }),
      svg("path", { class: "line", d: this.line(one, strong), "stroke-dasharray": one.dash || null }),
      one.dots ? one.mean.map((value, index) => (isNumber(value) ? svg("circle", { cx: this.middle(one, index), cy: this.y.at(value), r: 3.2 }) : null)) : null);
  }

  marks(height) {
    const seen = this.options.marks.filter((mark) => mark.step >= view.from && mark.step <= view.to);
    return seen.map((mark) => {
      const x = this.x.at(mark.step);
      return svg("g", { class: `mark ${mark.kind} ${mark.color || ""}` },
        seen.length <= MOST_LINES ? svg("line", { x1: x, x2: x, y1: TOP - 2, y2: height - BOTTOM }) : null,
        svg("path", { d: MARKS[mark.kind].path, transform: `translate(${x.toFixed(1)},${TOP - 3})` }));
    });
  }

  // The interval of a series that is shown for a step: the newest one at or before it. A run that has
  // ended has none.
  indexAt(one, step) {
    if (step !== null && step > one.until) return -1;
    const until = step === null ? view.to : step;
    let index = one.first.findLastIndex((first) => first <= until);
    while (index >= 0 && !isNumber(one.mean[index])) index -= 1;
    return index;
  }

  showCursor() {
    if (!this.x) return;
    const step = view.cursor;
    const { show } = this.options;
    const shown = this.series.map((one) => ({ one, index: this.indexAt(one, step) }));
    const x = step === null ? null : this.x.at(step);
    this.pointer.replaceChildren(...(x === null ? [] : [
      svg("line", { x1: x, x2: x, y1: TOP, y2: this.options.height - BOTTOM }),
      ...shown.filter(({ index }) => index >= 0).map(({ one, index }) => svg("circle", { class: one.color, cx: this.middle(one, index), cy: this.y.at(one.mean[index]), r: 4 })),
    ]));
    const reached = this.reached(shown);
    const near = x === null ? [] : this.options.marks.filter((mark) => Math.abs(this.x.at(mark.step) - x) < 5);
    this.readout.replaceChildren(
      el("li", { class: "step" }, reached),
      ...shown.map(({ one, index }) => this.read(one, index)),
      ...near.slice(0, 3).map((mark) => el("li", { class: "event" }, mark.text)));
    this.canvas.setAttribute("aria-label", `${this.options.title}, ${shown.map(({ one, index }) => `${one.label} ${index < 0 ? "unknown" : show(one.mean[index])}`).join(", ")}, ${reached}. Arrow keys go from step to step.`);
  }

  // The steps of the values that are shown, in words.
  reached(shown) {
    const step = view.cursor;
    if (isComparison) return step === null ? "last steps" : `step ${count(step)}`;
    const [first] = shown;
    if (!first || first.index < 0) return step === null ? "" : `step ${count(step)}`;
    const text = stepsText(first.one, first.index);
    return step === null && !this.options.small ? `last: ${text}` : text;
  }

  read(one, index) {
    const { show, small } = this.options;
    const isKnown = index >= 0;
    const hasRange = isKnown && one.low?.length && !small && !isComparison && show(one.low[index]) !== show(one.high[index]);
    return el("li", { class: one.color }, lineSample(one), one.label ? el("span", { class: "name" }, one.label) : null,
      el("b", {}, isKnown ? show(one.mean[index]) : MISSING),
      hasRange ? el("span", { class: "muted" }, `${show(one.low[index])} to ${show(one.high[index])}`) : null);
  }

  listen() {
    const pointed = (event) => {
      if (!this.x) return;
      const inside = event.clientX - this.canvas.getBoundingClientRect().left;
      const step = Math.round(this.x.value(inside));
      view.point(Math.min(view.to, Math.max(view.from, step)));
    };
    this.canvas.addEventListener("pointermove", pointed);
    this.canvas.addEventListener("pointerdown", pointed);
    this.canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && view.point(null));
    this.canvas.addEventListener("keydown", (event) => this.pressed(event));
    this.canvas.addEventListener("blur", () => view.point(null));
  }

  pressed(event) {
    const [longest] = [...this.series].sort((a, b) => b.first.length - a.first.length);
    if (!longest) return;
    const index = view.cursor === null ? longest.first.length : this.indexAt(longest, view.cursor);
    const next = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: longest.first.length - 1 }[event.key];
    if (event.key === "Escape") view.point(null);
    else if (next === undefined) return;
    else view.point(longest.last[Math.min(longest.last.length - 1, Math.max(0, next))]);
    event.preventDefault();
  }
}

// A running mean over about a twentieth of the curve.
function smoothed(values) {
  const share = 1 / Math.max(2, values.length / 20);
  let [mean, weight] = [0, 0];
  return values.map((value) => {
    if (!isNumber(value)) return value;
    mean += share * (value - mean);
    weight += share * (1 - weight);
    return mean / weight;
  });
}

function stepsText(one, index) {
  const [first, last] = [one.first[index], one.last[index]];
  return first === last ? `step ${count(first)}` : `steps ${count(first)} to ${count(last)}`;
}

// How a series is drawn, for legends.
function lineSample(one) {
  return svg("svg", { class: `sample ${one.color}`, width: 22, height: 10, viewBox: "0 0 22 10", "aria-hidden": "true" },
    svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, "stroke-dasharray": one.dash || null }),
    one.dots ? svg("circle", { cx: 11, cy: 5, r: 3.2 }) : null);
}
