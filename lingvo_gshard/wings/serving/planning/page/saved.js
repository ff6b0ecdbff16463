// Draws a comparison that was saved.

const { plans: saved, names } = JSON.parse(document.getElementById("data").textContent);
document.getElementById("page").replaceChildren(el("h1", {}, document.title), comparison(saved, names), ...notes(saved, names));
