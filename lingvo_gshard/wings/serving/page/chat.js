// A conversation: the turns of both sides. The last one grows while the model writes it.

const turns = [];
let writing = null;

// Adds a turn to the page, and returns the parts of it that change.
function showTurn(role, text) {
  const words = el("p", { class: "words" }, text), note = el("p", { class: "muted" });
  const who = role === "user" ? "You" : model.id;
  const item = el("article", { class: `turn ${role}`, "aria-label": who }, el("h2", {}, who), words, note);
  find("turns").append(item);
  return { item, words, note };
}

// Follows a growing answer, unless the reader has scrolled up.
function following(change) {
  const page = document.documentElement;
  const isAtEnd = page.scrollHeight - scrollY - innerHeight < 80;
  change();
  if (isAtEnd) scrollTo(0, page.scrollHeight);
}

function tell(state) {
  find("state").textContent = state;
  find("turns").setAttribute("aria-busy", String(Boolean(writing)));
  find("go").textContent = writing ? "Stop" : "Send";
  find("anew").hidden = !turns.length;
}

// Sends the conversation with a further message of the user, and shows the answer as it comes.
async function converse() {
  const text = find("text").value.trim();
  if (writing || !text) return;
  const mine = writing = new AbortController();
  turns.push({ role: "user", content: text });
  const asked = showTurn("user", text), answer = showTurn("assistant", "");
  find("text").value = "";
  find("examples").replaceChildren();
  problem(null);
  tell("The model is writing.");
  following(() => {});
  let content = "", reason = "", failure = null;
  try {
    for await (const part of events("/v1/chat/completions", { messages: turns, stream: true }, mine.signal)) {
      const [choice] = part.choices;
      content += choice?.delta.content || "";
      reason = choice?.finish_reason || reason;
      following(() => answer.words.textContent = content);
    }
  } catch (error) {
    failure = error;
  }
  // Another conversation has begun.
  if (writing !== mine) return;
  writing = null;
  const isStopped = mine.signal.aborted;
  if (failure && !content) {
    // Nothing was answered: the message goes back to where it can be changed.
    turns.pop();
    asked.item.remove();
    answer.item.remove();
    find("text").value ||= text;
    if (!turns.length) offer();
  } else {
    turns.push({ role: "assistant", content });
    if (!content) answer.words.textContent = "(nothing)";
    answer.note.textContent = isStopped ? "Stopped" : failure ? "Incomplete"
      : reason === "length" ? "Cut off: there is no room for a longer answer" : "";
  }
  if (failure && !isStopped) problem(failure);
  tell(isStopped ? "Stopped." : failure ? "" : "The answer is complete.");
}

function stop() {
  writing?.abort();
}

function beginAnew() {
  stop();
  writing = null;
  turns.length = 0;
  find("turns").replaceChildren();
  problem(null);
  offer();
  tell("A new conversation has begun.");
  find("text").focus();
}

function offer() {
  showExamples(model, (text) => {
    find("text").value = text;
    find("text").focus();
    converse();
  });
}

// Makes the page one of conversations.
function openChat() {
  document.body.classList.add("chat");
  find("facts").replaceChildren(`Answers in conversations. Training step ${model.step.toLocaleString("en")}.`, ...otherPage(model));
  find("label").textContent = "Message";
  if (!find("turns")) {
    const log = el("section", { id: "turns", role: "log", "aria-label": "Conversation" });
    find("ask").before(log, el("p", { id: "state", role: "status", class: "unseen" }), find("examples"));
    find("count").parentNode.replaceWith(
      el("button", { id: "anew", type: "button", class: "quiet", hidden: true, onclick: beginAnew }, "New conversation"));
    document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
  }
  if (!turns.length) offer();
  tell("");
}
