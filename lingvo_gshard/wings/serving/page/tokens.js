// Tokens with their probabilities. The shade behind a token says how unsure the model was.

const END = "</s>";

function shown(piece) {
  if (piece === END) return "end";
  // A space before a word is shown by a gap; one that is a token by itself as an open box.
  return piece === "\u2581" ? "\u2423" : piece.replaceAll("\u2581", "\u00a0").trim() || piece;
}

const startsWord = (piece) => piece.startsWith("\u2581");

// Tokens as a line of text: each on a ground that is the darker the less probable it was.
function tokenLine(tokens, onPick) {
  return el("div", { class: "tokens" }, tokens.map((token, index) => {
    const probability = Math.exp(token.log_probability);
    const isEnd = token.text === END;
    return el("button", {
      type: "button",
      class: `token${startsWord(token.text) ? " word" : ""}${isEnd ? " end" : ""}`,
      style: { "--doubt": String(Math.round(100 * (1 - probability))) },
      "aria-label": `${shown(token.text)}, probability ${percent(probability)}`,
      "aria-pressed": "false",
      onclick: (event) => onPick(index, event.currentTarget),
    }, el("span", { class: "piece" }, shown(token.text)), el("span", { class: "probability" }, percent(probability)));
  }));
}
