// Draws a comparison that was saved.

const { plans: saved, names } = JSON.parse(document.getElementById("data").textContent);
document.getElementById("page").replaceChildren(el("h1", {}, document.title), comparison(saved, names),
  ...saved.filter((plan) => plan.notes.length).map((plan) => section(`notes-${plan.topology.replace(/\W/g, "-")}`, `Notes on ${plan.topology}`,
    el("ul", {}, plan.notes.map((note) => el("li", {}, note))))));
