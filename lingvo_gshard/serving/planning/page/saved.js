// Draws a comparison that was saved.

const saved = JSON.parse(document.getElementById("data").textContent).plans;
document.getElementById("page").replaceChildren(el("h1", {}, document.title), comparison(saved),
  ...saved.filter((plan) => plan.notes.length).map((plan) => section(`notes-${plan.topology.replace(/\W/g, "-")}`, `Notes on ${plan.topology}`,
    el("ul", {}, plan.notes.map((note) => el("li", {}, note))))));
