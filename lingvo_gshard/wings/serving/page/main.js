// Asks the server what it serves, and sends it what is typed.

let model = null;

function problem(error) {
  const isLocked = error?.status === 401;
  find("unlock").hidden = !isLocked;
  find("problem").hidden = !error;
  find("problem").textContent = error ? error.message : "";
  if (isLocked) find("token").focus();
}

async function start() {
  const found = await call("/v1/models");
  problem(null);
  [model] = found.data;
  const translates = model.task === "translation";
  document.title = find("name").textContent = model.id;
  if (chats(model)) return openChat();
  const from = model.languages.length ? ` from ${model.languages.map(languageName).join(", ")}` : "";
  find("facts").textContent = translates ? `Translates${from}. Training step ${model.step.toLocaleString("en")}.`
    : `Continues texts. Training step ${model.step.toLocaleString("en")}.`;
  find("facts").append(...otherPage(model));
  find("label").textContent = translates ? "Sentence" : "Beginning of a text";
  showExamples(model, (text) => {
    find("text").value = text;
    submit();
  });
  find("go").textContent = translates ? "Translate" : "Continue";
  for (const option of find("count").options) option.hidden = option.disabled = Number(option.value) > model.most_beam_size;
}

async function ask() {
  const text = find("text").value, best = Number(find("count").value);
  if (model.task === "translation") {
    const body = { text: text.trim(), beam_size: Math.max(best, Math.min(4, model.most_beam_size)), best, routing: true };
    const { translations: [found] } = await call("/v1/translate", body);
    return found;
  }
  const found = await call("/v1/generate", { prompt: text, best, routing: true });
  return { alternatives: found.texts, seed: found.seed };
}

async function submit(event) {
  event?.preventDefault();
  if (writing) return event?.type === "submit" && stop();
  if (find("go").disabled || !find("text").value.trim()) return;
  find("go").disabled = true;
  document.body.classList.add("busy");
  try {
    if (!model) await start();
    if (chats(model)) {
      converse();
    } else {
      const found = await ask();
      problem(null);
      showAnswer(found, model.task === "translation");
    }
  } catch (error) {
    problem(error);
  } finally {
    find("go").disabled = false;
    document.body.classList.remove("busy");
  }
}

find("ask").addEventListener("submit", submit);
find("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
});
find("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, find("token").value.trim());
  start().then(() => find("text").focus(), problem);
});
start().catch(problem);
