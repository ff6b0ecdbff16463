// Creates elements. Text is never parsed as HTML, so nothing in it can run as code.

const SVG = "http://www.w3.org/2000/svg";

// Custom properties have no name in JavaScript.
function setStyle(node, name, value) {
  if (name.startsWith("--")) node.style.setProperty(name, value);
  else node.style[name] = value;
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) setStyle(node, key, text);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function swatch(color) {
  return el("span", { class: `swatch ${color}`, "aria-hidden": "true" });
}

// A path with a line break opportunity after each component.
function breakable(text) {
  return text.split(/(?<=[/.])/).flatMap((step, index) => (index ? [el("wbr"), step] : [step]));
}

// The page's only tooltip. Its content is also in a table or in a live region.
const tip = {
  node: null,

  show(lines, x, y) {
    if (!this.node) {
      this.node = el("div", { class: "tip", role: "tooltip" });
      document.body.append(this.node);
    }
    this.node.replaceChildren(...lines.map((line, index) => el(index ? "div" : "strong", {}, line)));
    this.node.hidden = false;
    const box = this.node.getBoundingClientRect();
    const left = Math.min(x + 14, document.documentElement.clientWidth - box.width - 8);
    const below = y + 18 + box.height < document.documentElement.clientHeight;
    this.node.style.left = `${Math.max(8, left)}px`;
    this.node.style.top = `${below ? y + 18 : Math.max(8, y - box.height - 10)}px`;
  },

  hide() {
    if (this.node) this.node.hidden = true;
  },
};

function explain(node, lines) {
  node.addEventListener("mousemove", (event) => tip.show(lines, event.clientX, event.clientY));
  node.addEventListener("mouseleave", () => tip.hide());
  return node;
}

function section(id, title, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title), ...children);
}
