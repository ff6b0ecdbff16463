// The form: what may be chosen, and a config.json that is dropped.

const field = (id) => document.getElementById(id);
const option = (value, text) => el("option", { value }, text || value);
const EXPERIMENT = "experiment:";
const CONFIG = "config:";
// The config.json that was dropped, and its name.
let dropped = null;

function offer(choices) {
  field("model").replaceChildren(
    option("", "choose one"),
    el("optgroup", { label: "Published models" }, choices.configs.map((name) => option(CONFIG + name, name))),
    el("optgroup", { label: "Experiments" }, choices.experiments.map((each) => option(EXPERIMENT + each.name, each.name))));
  field("topologies").replaceChildren(...choices.topologies.map((each) => option(each.topology, `${each.chip}, ${count(each.devices)} devices`)));
  field("strategies").replaceChildren(...choices.strategies.map((name) => option(name)));
  field("precision").replaceChildren(option("", "the model's own"), ...choices.precisions.map((name) => option(name)));
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
  if (asked.mode === "plan") {
    asked.mesh = field("mesh").value.trim();
    asked.strategy = field("strategy").value.trim();
  }
  if (field("batch").value) asked.batch_rows = Number(field("batch").value);
  if (field("length").value) asked.length = Number(field("length").value);
  asked.precision = field("precision").value;
  return asked;
}
