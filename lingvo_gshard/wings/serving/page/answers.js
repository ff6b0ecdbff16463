// The answer to one question: its texts, of which one is looked at closely.

function showAnswer({ alternatives, seed }, isTranslation) {
  const detail = el("div", { id: "detail" });
  const items = alternatives.map((one, index) => el("li", {},
    el("button", { type: "button", class: "alternative", "aria-pressed": String(!index), onclick: () => pick(index) },
      el("span", { class: "text" }, one.text || "(nothing)"),
      el("span", { class: "score" }, signed(one.score)))));

  function pick(index) {
    items.forEach((item, i) => item.firstChild.setAttribute("aria-pressed", String(i === index)));
    detail.replaceChildren(...close(alternatives[index]));
  }

  pick(0);
  const rest = alternatives.length > 1 ? [
    el("section", { "aria-labelledby": "alternatives-title" },
      el("div", { class: "title" }, el("h2", { id: "alternatives-title" }, isTranslation ? "Alternatives" : "Texts"),
        el("span", { class: "muted" }, isTranslation ? "score" : "log-probability")),
      el("ol", { id: "alternatives" }, items)),
  ] : [];
  const hint = alternatives[0].text.trim() ? [] : [el("p", { class: "muted" },
    "The model ends its answer at once. A model that has trained for few steps, or on other languages, does so: try another text.")];
  const drawn = seed === undefined ? [] : [el("p", { class: "muted" }, `Drawn with seed ${seed}`)];
  find("examples").replaceChildren();
  find("answer").replaceChildren(
    el("p", { id: "best" }, alternatives[0].text || "(nothing)"), ...hint, ...drawn, ...rest, detail);
}

// A text with the probability and the experts of each of its tokens.
function close(one) {
  const tokens = one.tokens;
  const sum = tokens.reduce((total, token) => total + token.log_probability, 0);
  const experts = el("section", { "aria-labelledby": "experts-title" },
    el("h2", { id: "experts-title" }, "Experts"),
    el("p", { class: "muted" }, "The larger a dot, the larger the weight of that expert\u2019s output for the token."),
    expertGrids(one.routing));

  function light(index, button) {
    const isOn = button.getAttribute("aria-pressed") === "true";
    for (const other of document.querySelectorAll(".token")) other.setAttribute("aria-pressed", "false");
    for (const cell of document.querySelectorAll(".lit")) cell.classList.remove("lit");
    if (isOn) return;
    button.setAttribute("aria-pressed", "true");
    const decoders = [...experts.querySelectorAll("figure")].filter((_, i) => one.routing.layers[i].stack === "decoder");
    for (const figure of decoders) for (const cell of figure.querySelectorAll(`[data-column="${index}"]`)) cell.classList.add("lit");
  }

  const probabilities = el("section", { "aria-labelledby": "tokens-title" },
    el("div", { class: "title" }, el("h2", { id: "tokens-title" }, "Tokens"),
      el("span", { class: "muted" }, `${tokens.length} tokens, log-probability ${signed(sum)}`)),
    tokenLine(tokens, light));
  return [probabilities, experts];
}
