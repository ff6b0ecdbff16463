const [windowWidth, leastContrast, leastOfLarge] = arguments;
const found = [];
const name = (e) => e.tagName.toLowerCase() + (e.id ? "#" + e.id : "") +
  [...e.classList].map((each) => "." + each).join("");
const root = document.documentElement;
if (root.scrollWidth > windowWidth) {
  const wide = [...document.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > windowWidth + 1);
  found.push(`the page is ${root.scrollWidth} wide, the window ${windowWidth}: ${wide.slice(0, 5).map(name)}`);
}
const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const rgba = (color) => {
  pen.clearRect(0, 0, 1, 1);
  pen.fillStyle = color;
  pen.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
};
const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
const light = ([r, g, b]) => {
  const linear = [r, g, b].map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
};
const canvas = rgba(matchMedia("(prefers-color-scheme: dark)").matches &&
  getComputedStyle(root).colorScheme.includes("dark") ? "#121212" : "#fff");
const isShown = (e) => e.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
const seen = new Set();
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node = walker.nextNode(); node; node = walker.nextNode()) {
  const e = node.parentElement, text = node.data.trim();
  if (!text || !isShown(e) || e.closest("script, style, noscript, [aria-hidden=true], :disabled, .unseen")) continue;
  const range = document.createRange();
  range.selectNodeContents(node);
  // What is beside the page, such as a drawer that is closed, is not shown.
  const boxes = [...range.getClientRects()].filter((box) => box.width > 1 && box.right > 0 && box.left < windowWidth);
  if (!boxes.length) continue;
  const chain = [];
  for (let at = e; at; at = at.parentElement) chain.unshift(at);
  let back = canvas, opacity = 1, hasPicture = false, cutter = null;
  for (const at of chain) {
    const style = getComputedStyle(at);
    back = over(rgba(style.backgroundColor), back);
    hasPicture ||= style.backgroundImage !== "none";
    opacity *= Number(style.opacity);
    const box = at.getBoundingClientRect();
    const cuts = ["hidden", "clip"].includes(style.overflowX) && !at.closest("svg");
    if (cuts && box.width > 2 && boxes.some((each) => each.right > box.right + 1.5 || each.left < box.left - 1.5)) cutter = at;
    if (["auto", "scroll"].includes(style.overflowX)) cutter = null;
  }
  if (cutter) found.push(`${name(cutter)} cuts ${JSON.stringify(text.slice(0, 50))}`);
  // In a drawing, a shape beside the text lies behind it.
  const middle = [(boxes[0].left + boxes[0].right) / 2, (boxes[0].top + boxes[0].bottom) / 2];
  for (const shape of e.closest("svg") ? e.parentElement.querySelectorAll("rect, path, circle") : []) {
    const box = shape.getBoundingClientRect(), { fill } = getComputedStyle(shape);
    if (middle[0] < box.left || middle[0] > box.right || middle[1] < box.top || middle[1] > box.bottom) continue;
    if (fill.startsWith("url")) hasPicture = true;
    else if (fill !== "none") back = over(rgba(fill), back);
  }
  if (hasPicture) continue;
  const style = getComputedStyle(e);
  const ink = rgba(e.closest("svg") && e.namespaceURI.endsWith("svg") ? style.fill : style.color);
  ink[3] *= opacity;
  const [a, b] = [light(over(ink, back)), light(back)];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const size = parseFloat(style.fontSize), isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
  const key = `${name(e)} ${ink} ${back}`;
  if (contrast < (isLarge ? leastOfLarge : leastContrast) && !seen.has(key)) {
    seen.add(key);
    found.push(`${name(e)} ${JSON.stringify(text.slice(0, 40))} has a contrast of ${contrast.toFixed(2)}`);
  }
}
for (const e of document.querySelectorAll("select")) {
  const style = getComputedStyle(e);
  pen.font = style.font;
  const room = e.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  const cut = [...e.options].filter((option) => pen.measureText(option.text).width > room + 1);
  if (isShown(e) && cut.length) found.push(`${name(e)} cuts ${JSON.stringify(cut[0].text)}`);
}
return found;
