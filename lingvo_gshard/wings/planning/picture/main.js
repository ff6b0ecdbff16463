// Assembles the page.

const { plan, mesh } = JSON.parse(document.getElementById("data").textContent);

document.getElementById("page").replaceChildren(
  headline(plan),
  ...remediesSection(plan),
  memorySection(plan),
  timeSection(plan),
  arithmeticSection(plan),
  communicationSection(plan),
  shardingSection(plan, mesh),
  layersSection(plan),
  temporariesSection(plan),
  notesSection(plan),
);
