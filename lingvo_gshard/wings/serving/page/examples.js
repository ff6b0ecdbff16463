// What the page shows before the first question: names of languages, and texts to try.

// A sentence as interfaces of programs have it, by language.
const SENTENCES = {
  ca: "No s'ha pogut desar el fitxer.",
  cs: "Soubor nelze uložit.",
  da: "Filen kunne ikke gemmes.",
  de: "Sie müssen ein Passwort eingeben.",
  en: "The file could not be saved.",
  es: "No se pudo guardar el archivo.",
  fr: "Vous devez saisir un mot de passe.",
  gl: "Non se puido gardar o ficheiro.",
  it: "Il file non esiste.",
  nl: "Het bestand kon niet worden opgeslagen.",
  pl: "Nie można zapisać pliku.",
  pt: "Não foi possível salvar o arquivo.",
  ro: "Fișierul nu a putut fi salvat.",
  ru: "Не удалось сохранить файл.",
  sv: "Filen kunde inte sparas.",
  uk: "Не вдалося зберегти файл.",
  zh: "无法保存文件。",
};
const BEGINNINGS = ["The file ", "To change the password, ", "The list of users "];
// For models that say no examples.
const OPENINGS = ["Hello!", "What can you do?", "Write two sentences about the sea."];
const MOST_EXAMPLES = 4;

// "Spanish" for "es", and "Portuguese (Brazil)" for "pt_BR"; the code itself if the browser knows no name.
function languageName(code) {
  try {
    return new Intl.DisplayNames(["en"], { type: "language" }).of(code.replace("_", "-"));
  } catch {
    return code;
  }
}

// A chat model continues texts, too, on the page "/?text".
const TEXT = "?text";
const chats = (model) => model.has_chat_template && location.search !== TEXT;

// A link between the two pages of a chat model.
const otherPage = (model) => !model.has_chat_template ? []
  : chats(model) ? [" ", el("a", { href: TEXT }, "Continue a text instead")] : [" ", el("a", { href: "?" }, "Hold a conversation instead")];

function examplesFor(model) {
  if (chats(model)) return model.examples.length ? model.examples : OPENINGS;
  if (model.task !== "translation") return BEGINNINGS;
  const known = model.languages.length ? model.languages : Object.keys(SENTENCES);
  return known.map((code) => SENTENCES[code.split("_")[0]]).filter(Boolean).slice(0, MOST_EXAMPLES);
}

// Buttons that put a text into the form and ask.
function showExamples(model, pick) {
  const buttons = examplesFor(model).map((text) =>
    el("button", { type: "button", class: "example", onclick: () => pick(text) }, text.trim()));
  find("examples").replaceChildren(...(buttons.length ? [el("span", { class: "muted" }, "Try"), ...buttons] : []));
}
