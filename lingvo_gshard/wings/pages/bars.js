// Stacked bars and bar charts.

// parts: {name, value, color, about}; limit: {name, value} of a line that marks the capacity.
function stackedBar(parts, limit, show, label) {
  const total = sum(parts.map((part) => part.value));
  const whole = Math.max(total, limit ? limit.value : 0) || 1;
  const bar = el("div", { class: "stack", role: "img", "aria-label": `${label}: ${parts.map((part) => `${part.name} ${show(part.value)}`).join(", ")}${limit ? `; ${limit.name} ${show(limit.value)}` : ""}` });
  for (const part of parts) {
    if (!(part.value > 0)) continue;
    const piece = el("div", { class: `piece ${part.color}`, style: { width: `${(part.value / whole) * 100}%` } });
    bar.append(explain(piece, [part.name, show(part.value), `${share(part.value / whole)} of ${limit && limit.value >= total ? limit.name : "all"}`, part.about].filter(Boolean)));
  }
  if (!limit) return bar;
  const over = total > limit.value;
  const line = el("div", { class: over ? "limit over" : "limit", "aria-hidden": "true", style: { left: `${(limit.value / whole) * 100}%` } });
  return el("div", { class: "limited" }, bar, line);
}

// Shares are of `whole`, by default of all parts together.
function legend(parts, show, whole) {
  const total = whole || sum(parts.map((part) => part.value));
  return el("ul", { class: "legend" }, parts.map((part) =>
    el("li", { title: part.about },
      swatch(part.color), el("span", { class: "name" }, part.name),
      show ? el("span", { class: "amount" }, show(part.value)) : null,
      show && total ? el("span", { class: "part" }, share(part.value / total)) : null)));
}

// rows: {name, value, note}; a bar chart in one color.
function barList(rows, show, label) {
  const most = Math.max(...rows.map((row) => row.value), 0) || 1;
  return el("ul", { class: "barlist", "aria-label": label }, rows.map((row) =>
    el("li", {},
      el("span", { class: "name" }, row.name),
      el("span", { class: "track", "aria-hidden": "true" },
        el("span", { class: "length", style: { width: `${(row.value / most) * 100}%` } })),
      el("span", { class: "amount" }, show(row.value)),
      el("span", { class: "note" }, row.note))));
}

// A pair of toggle buttons; one is always pressed.
function switchOf(label, choices, chosen, onchange) {
  const buttons = choices.map(([value, text]) =>
    el("button", { type: "button", "data-value": value, "aria-pressed": String(value === chosen), onclick: () => {
      buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.value === value)));
      onchange(value);
    } }, text));
  return el("div", { class: "switch", role: "group", "aria-label": label }, buttons);
}
