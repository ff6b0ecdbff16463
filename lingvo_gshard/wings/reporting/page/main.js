// Assembles the page.

document.getElementById("page").replaceChildren(
  headline(),
  curvesSection(),
  scoresSection(),
  ...routersSection(),
  ...profileSection(),
  shardingSection(),
  setupSection(),
);
