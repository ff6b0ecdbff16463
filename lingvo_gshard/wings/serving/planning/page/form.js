// The form: what may be chosen, and a config.json that is dropped.

const field = (id) => document.getElementById(id);
const option = (value, text) => el("option", { value }, text || value);
const EXPERIMENT = "experiment:";
const CONFIG = "config:";
// Id of a field, name in a request, and whether its value is a number.
const FIELDS = [
  ["mesh", "mesh"], ["strategy", "strategy"], ["batch", "batch_rows", true], ["length", "length", true], ["precision", "precision"],
  ["rematerialize", "rematerialize"], ["micro-batches", "micro_batches", true], ["dispatch", "dispatch"], ["tokens", "tokens", true], ["price", "price", true],
];
// Fields that a mode does not use.
const UNUSED = [["search", ["mesh", "strategy", "rematerialize", "micro-batches"]], ["generate", ["rematerialize", "micro-batches"]]];
// The config.json that was dropped, and its name.
let dropped = null;

function offer(choices) {
  field("model").replaceChildren(
    option("", "choose one"),
    el("optgroup", { label: "Published models" }, choices.configs.map((name) => option(CONFIG + name, name))),
    el("optgroup", { label: "Experiments" }, choices.experiments.map((each) => option(EXPERIMENT + each.name, each.name))));
  field("topologies").replaceChildren(...choices.topologies.map((each) => option(each.topology, `${each.chip}, ${count(each.devices)} devices`)));
  field("strategies").replaceChildren(...choices.strategies.map((name) => option(name)));
  for (const [id, names] of [["precision", choices.precisions], ["rematerialize", choices.policies], ["dispatch", choices.dispatches]]) {
    field(id).replaceChildren(option("", "the model's own"), ...names.map((name) => option(name)));
  }
}

async function take(file) {
  try {
    const content = JSON.parse(await file.text());
    if (!content || typeof content !== "object" || Array.isArray(content)) throw new Error();
    dropped = { content, title: content._name_or_path || content.model_type || file.name };
    field("model").value = "";
    field("chosen").textContent = `Model: ${file.name} (${dropped.title})`;
    return "";
  } catch {
    dropped = null;
    return `${file.name} is no JSON object; a config.json was expected.`;
  }
}

function request() {
  const model = field("model").value;
  const asked = { topology: field("topology").value.trim(), mode: field("mode").value };
  if (model.startsWith(EXPERIMENT)) asked.experiment = model.slice(EXPERIMENT.length);
  else if (model.startsWith(CONFIG)) asked.config = model.slice(CONFIG.length);
  else if (dropped) Object.assign(asked, dropped);
  else throw new Error("Choose a model, or drop a config.json.");
  for (const [id, name, isNumber] of FIELDS) {
    const value = field(id).value.trim();
    if (field(id).disabled || !value) continue;
    if (isNumber && !(Number(value) >= 0)) throw new Error(`${value} is no number.`);
    asked[name] = isNumber ? Number(value) : value;
  }
  return asked;
}

function adapt() {
  const mode = field("mode").value;
  for (const id of UNUSED.flatMap(([, ids]) => ids)) field(id).disabled = false;
  for (const [unused, ids] of UNUSED) if (unused === mode) ids.forEach((id) => { field(id).disabled = true; });
  field("batch-title").textContent = mode === "generate" ? "Texts decoded together" : "Rows of a batch";
}
