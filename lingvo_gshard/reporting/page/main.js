// Assembles the page.

document.getElementById("page").replaceChildren(
  headline(),
  curvesSection(),
  scoresSection(),
  ...routersSection(),
  shardingSection(),
  setupSection(),
);
