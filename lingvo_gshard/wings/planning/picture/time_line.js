// A time line of a step's layers, with a lane for computation and a lane for communication.

const PHASES = ["forward", "rematerialized", "backward", "optimizer", "other"];
const LANES = { loops: [0, 20], compute: [26, 46], communication: [80, 46], axis: [134, 22] };
const GUTTER = 108;
const SHORTEST_VIEW = 1e-4;
const LETTER_WIDTH = 7;

const layerName = (row) => row.layer || "(no layer)";
const phaseOf = (row) => (PHASES.includes(row.phase) ? row.phase : "other");
const phaseColour = (row) => `phase-${phaseOf(row)}`;
const timeOf = (row, mode) => (mode === "bound" ? row.seconds_bound : row.seconds) || 0;

// Estimates the communication time of each row from its layer's collectives.
function communicationOf(layers, collectives) {
  const key = (row) => JSON.stringify([row.layer || "", row.phase]);
  const add = (map, row, value) => map.set(key(row), (map.get(key(row)) || 0) + (value || 0));
  const [estimates, bounds] = [new Map(), new Map()];
  collectives.forEach((row) => add(estimates, row, row.seconds));
  layers.forEach((row) => add(bounds, row, row.communication_seconds));
  return (row) => {
    const bound = bounds.get(key(row));
    return bound > 0 ? (estimates.get(key(row)) ?? bound) * ((row.communication_seconds || 0) / bound) : 0;
  };
}

// Places blocks in time. In the estimate a layer computes, then communicates. In the bound,
// communication overlaps computation, so each lane has its own clock.
function layOut(layers, collectives, mode) {
  const estimate = communicationOf(layers, collectives);
  const clock = { compute: 0, communication: 0 };
  return layers.map((row, number) => {
    const length = timeOf(row, mode);
    const moving = Math.min(length, mode === "bound" ? row.communication_seconds || 0 : estimate(row));
    if (mode !== "bound") clock.compute = clock.communication = Math.max(clock.compute, clock.communication);
    const compute = [clock.compute, clock.compute + length - moving];
    const first = mode === "bound" ? clock.communication : compute[1];
    const communication = [first, first + moving];
    clock.compute = compute[1];
    clock.communication = communication[1];
    const busy = [compute, communication].filter(([from, to]) => to > from);
    const parts = busy.length ? busy : [compute];
    return {
      row, number, length, compute, communication,
      start: Math.min(...parts.map(([from]) => from)), end: Math.max(...parts.map(([, to]) => to)),
      // Loops are drawn above the compute lane if the lanes have separate clocks.
      span: mode === "bound" ? compute : [compute[0], communication[1]],
      byMemory: (row.memory_seconds || 0) > (row.compute_seconds || 0),
    };
  });
}

// Groups neighboring blocks of one loop into brackets.
function loopsOf(blocks) {
  const found = [];
  for (const block of blocks) {
    const { layer, phase, times } = block.row;
    if (!(times > 1) || !block.length) continue;
    const name = (layer || "").split(/\/body(?:_\d+)?(?:\/|$)/)[0] || layerName(block.row);
    const key = `${times} ${name} ${phase === "rematerialized" ? "backward" : phase}`;
    const last = found[found.length - 1];
    const [start, end] = block.span;
    if (last && last.key === key && last.next === block.number) Object.assign(last, { end, next: last.next + 1 });
    else found.push({ key, name, times, start, end, next: block.number + 1 });
  }
  return found;
}

function blockLines(block, mode, total) {
  const { row } = block;
  return [
    layerName(row),
    `${row.phase}${row.times > 1 ? `, × ${count(row.times)} in a loop` : ""}`,
    `estimate ${seconds(row.seconds)}, bound ${seconds(row.seconds_bound)}; ${share(total ? block.length / total : 0)} of the step's ${mode}`,
    `bounds: compute ${seconds(row.compute_seconds)}, memory ${seconds(row.memory_seconds)}, communication ${seconds(row.communication_seconds)}`,
    `${flops(row.flops)}, ${bytes(row.bytes)} read and written`,
  ];
}

function ticks(start, end, most) {
  const rough = (end - start) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough);
  const found = [];
  for (let at = Math.ceil(start / step - 1e-9) * step; at <= end * (1 + 1e-12); at += step) found.push(at);
  return found;
}

class TimeLine {
  constructor(layers, collectives, mode) {
    this.layers = layers;
    this.collectives = collectives;
    this.chosen = null;
    this.status = el("p", { class: "detail", "aria-live": "polite" });
    this.window = el("div", { class: "window" });
    this.canvas = svg("svg", { class: "timeline", tabindex: "0", role: "application", "aria-roledescription": "time line" });
    this.loops = svg("g", {});
    this.lanes = svg("g", {});
    this.axis = svg("g", { class: "axis" });
    this.canvas.append(hatching(), this.loops, this.lanes, this.axis);
    this.frame = el("div", {}, this.canvas);
    this.node = el("div", { class: "timebox" }, this.frame,
      el("div", { class: "overview", "aria-hidden": "true" }, this.window), this.status);
    this.listen();
    this.setMode(mode);
    new ResizeObserver(() => this.draw()).observe(this.frame);
  }

  setMode(mode) {
    this.mode = mode;
    this.blocks = layOut(this.layers, this.collectives, mode);
    this.total = Math.max(0, ...this.blocks.map((block) => block.end));
    this.view = { start: 0, end: this.total };
    this.draw();
    this.tell();
  }

  get width() {
    return Math.max(320, this.frame.clientWidth || 1000);
  }

  at(time) {
    return GUTTER + ((time - this.view.start) / (this.view.end - this.view.start)) * (this.width - GUTTER);
  }

  timeAt(x) {
    const left = this.canvas.getBoundingClientRect().left + GUTTER;
    const part = Math.min(1, Math.max(0, (x - left) / (this.width - GUTTER)));
    return this.view.start + part * (this.view.end - this.view.start);
  }

  zoom(factor, around = (this.view.start + this.view.end) / 2) {
    const length = Math.min(this.total, Math.max(this.total * SHORTEST_VIEW, (this.view.end - this.view.start) * factor));
    const part = (around - this.view.start) / (this.view.end - this.view.start);
    this.look(around - part * length, length);
  }

  look(start, length = this.view.end - this.view.start) {
    const first = Math.min(Math.max(0, start), this.total - length);
    this.view = { start: first, end: first + length };
    this.draw();
  }

  choose(index) {
    if (!this.blocks.length) return;
    this.chosen = Math.min(this.blocks.length - 1, Math.max(0, index));
    const { start, end } = this.blocks[this.chosen];
    if (start < this.view.start || end > this.view.end) this.look((start + end) / 2 - (this.view.end - this.view.start) / 2);
    else this.draw();
    this.tell();
  }

  tell() {
    this.canvas.setAttribute("aria-label", `${count(this.blocks.length)} layers in order of execution, ${seconds(this.total)} (${this.mode}). Arrow keys go from layer to layer, plus and minus zoom, 0 shows all.`);
    if (this.chosen === null) {
      this.status.textContent = "Point at a block, or go through them with the arrow keys.";
      return;
    }
    const [name, ...rest] = blockLines(this.blocks[this.chosen], this.mode, this.total);
    this.status.replaceChildren(el("strong", {}, name), ` ${rest.join(" · ")}`);
  }

  draw() {
    if (!this.total) return;
    this.canvas.setAttribute("viewBox", `0 0 ${this.width} 158`);
    this.canvas.setAttribute("width", this.width);
    this.canvas.setAttribute("height", 158);
    const seen = (start, end) => end >= this.view.start && start <= this.view.end;
    this.loops.replaceChildren(...loopsOf(this.blocks).filter((loop) => seen(loop.start, loop.end)).map((loop) => this.bracket(loop)));
    this.lanes.replaceChildren(...this.blocks.flatMap((block, index) => (seen(block.start, block.end) ? this.block(block, index) : [])));
    this.axis.replaceChildren(...this.scale(), ...this.gutter());
    this.window.style.left = `${(this.view.start / this.total) * 100}%`;
    this.window.style.width = `${((this.view.end - this.view.start) / this.total) * 100}%`;
  }

  bracket({ name, times, start, end }) {
    const left = Math.max(GUTTER, this.at(start));
    const width = Math.min(this.width, this.at(end)) - left - 1;
    const text = `× ${times}`;
    const room = Math.floor((width - 10) / LETTER_WIDTH);
    const label = room >= text.length + 3 + name.length ? `${text}  ${name}` : room >= text.length ? text : "";
    return explain(svg("g", { class: "loop" },
      svg("rect", { x: left, y: 0, width: Math.max(1, width), height: 18, rx: 3 }),
      label ? svg("text", { x: left + width / 2, y: 13, "text-anchor": "middle" }, label) : null),
    [name, `a loop, executed ${count(times)} times: ${seconds(end - start)} in all, ${seconds((end - start) / times)} each`]);
  }

  block(block, index) {
    const drawn = ([start, end]) => end > start && end >= this.view.start && start <= this.view.end;
    return ["compute", "communication"].filter((lane) => drawn(block[lane])).map((lane) => {
      const [start, end] = block[lane].map((time) => this.at(time));
      const left = Math.max(GUTTER, start);
      const width = Math.max(0.6, Math.min(this.width, end) - left - (end - start > 3 ? 1 : 0));
      const [y, height] = LANES[lane];
      const box = { x: left, y, width, height, rx: width > 6 ? 2 : 0 };
      const short = layerName(block.row).split("/").pop();
      const group = svg("g", { class: `block ${phaseColour(block.row)}${index === this.chosen ? " chosen" : ""}`, "data-index": index },
        svg("rect", box),
        lane === "compute" && block.byMemory ? svg("rect", { ...box, class: "hatch", fill: "url(#hatch)" }) : null,
        width > short.length * LETTER_WIDTH + 12 ? svg("text", { x: left + 6, y: y + height / 2 + 4 }, short) : null);
      group.addEventListener("click", () => this.choose(index));
      return explain(group, blockLines(block, this.mode, this.total));
    });
  }

  scale() {
    const [top, height] = LANES.axis;
    const marks = ticks(this.view.start, this.view.end, (this.width - GUTTER) / 110);
    return [svg("line", { x1: GUTTER, x2: this.width, y1: top, y2: top }), ...marks.map((time) => {
      const x = this.at(time);
      const anchor = x > this.width - 40 ? "end" : x < GUTTER + 20 ? "start" : "middle";
      return svg("g", {}, svg("line", { x1: x, x2: x, y1: top, y2: top + 5 }),
        svg("text", { x, y: top + height - 4, "text-anchor": anchor }, seconds(Math.abs(time) < 1e-15 ? 0 : time)));
    })];
  }

  gutter() {
    return Object.entries(LANES).filter(([lane]) => lane !== "axis").map(([lane, [y, height]]) =>
      svg("text", { x: 0, y: y + height / 2 + 4, class: "lane" }, lane));
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => {
      // The wheel without a modifier key scrolls the page.
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY * 0.004), this.timeAt(event.clientX));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      const from = { x: event.clientX, start: this.view.start };
      const move = (to) => this.look(from.start - ((to.clientX - from.x) / (this.width - GUTTER)) * (this.view.end - this.view.start));
      const stop = () => { removeEventListener("pointermove", move); removeEventListener("pointerup", stop); };
      addEventListener("pointermove", move);
      addEventListener("pointerup", stop);
    });
    const keys = {
      ArrowRight: () => this.choose(this.chosen === null ? 0 : this.chosen + 1),
      ArrowLeft: () => this.choose(this.chosen === null ? 0 : this.chosen - 1),
      Home: () => this.choose(0),
      End: () => this.choose(this.blocks.length - 1),
      "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1 / 0.6), 0: () => this.zoom(Infinity),
    };
    canvas.addEventListener("keydown", (event) => {
      if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      keys[event.key]();
    });
  }
}

function hatching() {
  return svg("defs", {}, svg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("line", { x1: 0, y1: 0, x2: 0, y2: 6, class: "hatchline" })));
}
