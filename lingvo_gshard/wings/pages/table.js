// Tables that sort by any column. Long tables have a text filter.

const ROWS_AT_FIRST = 15;
const FEW_ROWS = 5;

const column = (head, value, more) => ({ head, value, ...more });
const field = (head, name, more) => column(head, (row) => row[name], more);
const numeric = (head, name, show, more) => field(head, name, { number: true, show, ...more });
const code = (value) => el("code", {}, value === "" || value === undefined || value === null ? MISSING : breakable(String(value)));

// columns: {head, value(row) -> number or text, show(value, row) -> text or node, number, bar, wide}
// options: {id, caption, first: index of the column sorted by at first, choose(row), chosen(row),
//   inOrder: the rows have a meaningful order}
function dataTable(columns, rows, options) {
  const state = { column: options.first ?? null, down: true, words: "", all: false, chosen: null };
  if (state.column !== null) state.down = Boolean(columns[state.column].number);
  const largest = columns.map((column) =>
    column.bar ? Math.max(0, ...rows.map(column.value).filter(isNumber)) : 0);
  const texts = rows.map((row) => columns.map((column) => textOf(column, row)).join(" ").toLowerCase());

  const body = el("tbody");
  const counted = el("span", { class: "counted", role: "status" });
  const more = el("button", { class: "quiet", type: "button", onclick: () => { state.all = !state.all; draw(); } });
  const heads = columns.map((column, index) => headCell(column, () => sortBy(index)));
  const filter = el("input", {
    type: "search", placeholder: "Filter", "aria-label": `Filter ${options.caption}`, "aria-controls": options.id,
    oninput: (event) => { state.words = event.target.value.trim().toLowerCase(); draw(); },
  });

  function sortBy(index) {
    // The first click sorts numbers in descending order and text in ascending order.
    state.down = state.column === index ? !state.down : Boolean(columns[index].number);
    state.column = index;
    draw();
  }

  function ordered() {
    const words = state.words.split(/\s+/).filter(Boolean);
    const kept = rows.map((row, index) => index).filter((index) => words.every((word) => texts[index].includes(word)));
    if (state.column === null) return kept;
    const value = columns[state.column].value;
    const sign = state.down ? -1 : 1;
    return kept.sort((a, b) => compare(value(rows[a]), value(rows[b]), sign) || a - b);
  }

  function draw() {
    const kept = ordered();
    const shown = state.all ? kept : kept.slice(0, ROWS_AT_FIRST);
    body.replaceChildren(...shown.map((index) => bodyRow(rows[index])));
    if (!kept.length) body.append(el("tr", {}, el("td", { colspan: columns.length, class: "nothing" }, "No row holds that.")));
    heads.forEach((head, index) => {
      const sorted = index === state.column ? (state.down ? "descending" : "ascending") : "none";
      head.setAttribute("aria-sort", sorted);
    });
    const found = kept.length === rows.length ? `${count(rows.length)} rows` : `${count(kept.length)} of ${count(rows.length)} rows`;
    counted.textContent = shown.length < kept.length ? `${found}, ${shown.length} shown` : found;
    more.hidden = kept.length <= ROWS_AT_FIRST;
    more.textContent = state.all ? `Show the first ${ROWS_AT_FIRST}` : `Show all ${count(kept.length)}`;
  }

  function bodyRow(row) {
    const cells = columns.map((column, index) => bodyCell(column, row, largest[index]));
    if (!options.choose) return el("tr", {}, cells);
    const choose = () => { state.chosen = row; draw(); options.choose(row); };
    const line = el("tr", { class: "choosable", "aria-selected": String(state.chosen === row) }, cells);
    const button = el("button", { class: "link", type: "button", "aria-pressed": String(state.chosen === row) }, ...cells[0].childNodes);
    cells[0].replaceChildren(button);
    line.addEventListener("click", (event) => {
      const byButton = button.contains(event.target);
      choose();
      // The row was redrawn: keep the keyboard focus on it.
      if (byButton) body.querySelector("tr[aria-selected=true] button")?.focus();
    });
    return line;
  }

  if (options.choose) state.chosen = options.chosen ?? null;
  draw();
  return el("div", { class: "data" },
    rows.length > FEW_ROWS ? el("div", { class: "tools" }, filter, counted) : null,
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": options.caption },
      el("table", { id: options.id },
        el("caption", { class: "unseen" }, options.caption),
        el("thead", {}, el("tr", {}, heads)), body)),
    more);
}

function headCell(column, onclick) {
  return el("th", { scope: "col", "aria-sort": "none", class: column.number ? "number" : null },
    el("button", { type: "button", title: column.title, onclick }, column.head, el("span", { class: "arrow", "aria-hidden": "true" })));
}

function bodyCell(column, row, most) {
  const value = column.value(row);
  const shown = column.show ? column.show(value, row) : value ?? MISSING;
  const cell = el("td", { class: [column.number ? "number" : "", column.wide ? "wide" : ""].join(" ").trim() || null }, shown);
  if (column.bar && most > 0 && isNumber(value)) {
    cell.classList.add("barred");
    cell.append(el("span", { class: "cellbar", "aria-hidden": "true", style: { width: `${(value / most) * 100}%` } }));
  }
  return cell;
}

function textOf(column, row) {
  const value = column.value(row);
  const shown = column.show ? column.show(value, row) : value;
  return shown instanceof Node ? shown.textContent : String(shown ?? "");
}

function compare(a, b, sign) {
  const missing = (value) => value === null || value === undefined || value === "";
  // Missing values come last in both directions.
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  return sign * String(a).localeCompare(String(b), "en", { numeric: true });
}
