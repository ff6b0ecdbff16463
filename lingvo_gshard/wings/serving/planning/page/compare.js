// Draws plans side by side. Differences are marked, and the best value of a row is green.

const collectiveKinds = (plans) => [...new Set(plans.flatMap((plan) => plan.collectives.map((row) => row.kind)))].sort();
const ofKind = (plan, kind) => sum(plan.collectives.filter((row) => row.kind === kind).map((row) => row.seconds));

// Title, value, how to write it, and which direction is better: -1 less, 1 more, 0 neither.
function comparedRows(plans) {
  const memory = (name) => (plan) => plan.bytes_per_device[name];
  return [
    ["The plan"],
    ["experiment", (plan) => plan.name, String, 0],
    ["machine", (plan) => plan.topology, String, 0],
    ["chip", (plan) => plan.chip, String, 0],
    ["devices", (plan) => plan.devices, count, 0],
    ["compiler", (plan) => plan.compiler, String, 0],
    ["mesh", (plan) => plan.mesh, String, 0],
    ["strategy", (plan) => plan.strategy_name || plan.strategy, String, 0],
    ["tokens of a step", (plan) => plan.tokens_per_step, count, 0],
    ["Memory of a device"],
    ["fits", (plan) => (plan.fits ? "yes" : "no"), String, 0],
    ["peak", memory("peak"), bytes, -1],
    ["capacity", memory("capacity"), bytes, 0],
    ["weights", memory("weights"), bytes, -1],
    ["moments", memory("moments"), bytes, -1],
    ["activations, temporaries", memory("activations"), bytes, -1],
    ["Time"],
    ["step (estimate)", (plan) => plan.seconds_per_step, seconds, -1],
    ["step (bound)", (plan) => plan.seconds_per_step_bound, seconds, -1],
    ["tokens a second", (plan) => plan.tokens_per_second, large, 1],
    ["tokens a second and device", (plan) => (isNumber(plan.tokens_per_second) ? plan.tokens_per_second / plan.devices : null), large, 1],
    ["MFU", (plan) => plan.mfu, share, 1],
    ["Cost"],
    ["tokens", (plan) => plan.budget?.tokens, large, 0],
    ["chip-hours", (plan) => plan.budget?.chip_hours, large, -1],
    [["price", plans.map((plan) => plan.budget?.currency).find(Boolean)].filter(Boolean).join(", "), (plan) => plan.budget?.price, large, -1],
    ["Exposed communication"],
    ...collectiveKinds(plans).map((kind) => [kind, (plan) => ofKind(plan, kind), seconds, -1]),
  ];
}

function change(value, first) {
  if (!isNumber(value) || !isNumber(first) || !first || value === first) return null;
  const percent = (value / first - 1) * 100;
  const text = Math.abs(percent) >= 1000 ? `× ${digits(value / first)}` : `${percent > 0 ? "+" : "−"}${digits(Math.abs(percent))} %`;
  return el("span", { class: "change" }, text);
}

function comparedRow(plans, [title, value, write, better]) {
  if (!value) return el("tr", { class: "group" }, el("th", { scope: "rowgroup", colspan: plans.length + 1 }, title));
  const values = plans.map(value);
  const differs = values.some((each) => each !== values[0]);
  const numbers = values.filter(isNumber);
  const best = better && differs && numbers.length > 1 ? (better < 0 ? Math.min(...numbers) : Math.max(...numbers)) : null;
  const cells = values.map((each, index) => el("td", { class: each === best ? "best" : null },
    each === null || each === undefined ? MISSING : write(each), index ? change(each, values[0]) : null));
  return el("tr", { class: differs ? "differs" : null }, el("th", { scope: "row" }, title), cells);
}

// A text whose parts in backquotes are settings.
const coded = (text) => text.split("`").map((part, index) => (index % 2 ? el("code", {}, breakable(part)) : part));

const titleOf = (plan, name) => `${name} on ${plan.topology}`;

function notes(plans, names) {
  return plans.flatMap((plan, index) => (plan.notes.length ? [el("details", { class: "notes" },
    el("summary", {}, `Notes on ${titleOf(plan, names[index])}`, plan.change ? [", ", coded(plan.change)] : null),
    el("ul", {}, plan.notes.map((note) => el("li", {}, coded(note)))))] : []));
}

function comparison(plans, names) {
  const heads = plans.map((plan, index) => el("th", { scope: "col" }, titleOf(plan, names[index]),
    plan.change ? el("span", { class: "change" }, coded(plan.change)) : null));
  return el("div", { class: "scroll" }, el("table", { class: "compared", style: { "--plans": plans.length } },
    el("thead", {}, el("tr", {}, el("th", {}, ""), heads)),
    el("tbody", {}, comparedRows(plans).map((row) => comparedRow(plans, row)))));
}
