// Which experts each token was routed to: for each layer a grid of experts by tokens.

// Layers of one stack that have a path in common stand one after another in a compiled loop.
function layerNames(layers) {
  const counts = {};
  return layers.map((layer) => {
    counts[layer.stack] = (counts[layer.stack] || 0) + 1;
    return `${layer.stack === "encoder" ? "Encoder" : "Decoder"}, expert layer ${counts[layer.stack]}`;
  });
}

function grid(layer, name, tokens, index) {
  const experts = [...Array(layer.num_experts).keys()];
  const used = experts.filter((expert) => tokens.some((token) => token.experts[index].some(([e]) => e === expert)));
  const rows = layer.num_experts <= 16 ? experts : used;
  const gate = (token, expert) => (token.experts[index].find(([e]) => e === expert) || [0, 0])[1];
  const head = el("tr", {}, el("th", { scope: "col", class: "corner" }, "Expert"),
    tokens.map((token, column) => el("th", { scope: "col", "data-column": column }, el("span", {}, shown(token.text)))));
  const body = rows.map((expert) => el("tr", {},
    el("th", { scope: "row" }, String(expert)),
    tokens.map((token, column) => {
      const share = gate(token, expert);
      const words = `${shown(token.text)}: expert ${expert}, gate ${share.toFixed(2)}`;
      return el("td", { "data-column": column, title: share ? words : null, style: { "--gate": String(Math.round(100 * share)) } },
        share ? el("span", { class: "dot" }, el("span", { class: "unseen" }, share.toFixed(2))) : null);
    })));
  return el("figure", { class: "layer" },
    el("figcaption", {}, name, el("small", {}, layer.path)),
    el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": name },
      el("table", { class: "experts" }, el("thead", {}, head), el("tbody", {}, body))));
}

function expertGrids(routing) {
  const names = layerNames(routing.layers);
  if (!names.length) return el("p", { class: "muted" }, "This model has no mixture of experts.");
  const positions = {};
  return routing.layers.map((layer, number) => {
    const index = positions[layer.stack] = (positions[layer.stack] ?? -1) + 1;
    const tokens = layer.stack === "encoder" ? routing.source : routing.tokens;
    return tokens.length ? grid(layer, names[number], tokens, index) : null;
  });
}
