// The list of plans, their progress, and those that are compared.

const POLL = 700;
const jobs = new Map();
const chosen = new Set();

function complain(text) {
  field("problem").textContent = text;
  field("problem").hidden = !text;
}

function stateOf(job) {
  if (job.state === "done") return `${job.plan.fits ? "fits" : "does not fit"}, ${seconds(job.plan.seconds_per_step)} a step`;
  if (job.state === "failed") return job.problem;
  if (job.state === "waiting") return "waits";
  return `${job.stage || "begins"}, ${Math.round(job.seconds || 0)} s`;
}

function item(job) {
  const box = el("input", { type: "checkbox", disabled: job.state !== "done", checked: chosen.has(job.id), onchange: (event) => {
    if (event.target.checked) chosen.add(job.id);
    else chosen.delete(job.id);
    compare();
  } });
  const sharding = job.request.mode === "search" ? "searched" : [job.request.mesh, job.request.strategy].filter(Boolean).join(", ");
  const name = `${job.model} on ${job.request.topology}${sharding ? `, ${sharding}` : ""}`;
  const isOpen = job.state === "waiting" || job.state === "running";
  return el("li", { "data-id": job.id, "data-state": job.state }, el("label", {}, box, name),
    isOpen ? el("progress", { max: 1, value: job.share, "aria-label": "progress" }) : null,
    el("span", { class: `state ${job.state === "failed" ? "bad" : ""}` }, stateOf(job)),
    job.state === "done" ? el("a", { class: "quiet", href: `/saved?plans=${job.id}`, download: "" }, "Save") : null);
}

function compare() {
  const ids = [...jobs.keys()].filter((id) => chosen.has(id) && jobs.get(id).state === "done");
  field("comparison").hidden = !ids.length;
  field("save").href = `/saved?plans=${ids.join(",")}`;
  field("table").replaceChildren(...(ids.length ? [comparison(ids.map((id) => jobs.get(id).plan), ids.map((id) => jobs.get(id).model))] : []));
}

function draw() {
  field("plans").hidden = !jobs.size;
  field("jobs").replaceChildren(...[...jobs.values()].reverse().map(item));
}

async function watch(id) {
  for (;;) {
    const job = await call(`/api/plans/${id}`);
    jobs.set(id, job);
    if (job.state === "done") chosen.add(id);
    draw();
    if (job.state === "done" || job.state === "failed") break;
    await new Promise((resolve) => setTimeout(resolve, POLL));
  }
  compare();
}

async function submit() {
  complain("");
  const job = await call("/api/plans", request());
  jobs.delete(job.id);
  // The plan itself comes with the next answer.
  jobs.set(job.id, job.state === "done" ? { ...job, state: "running" } : job);
  draw();
  await watch(job.id);
}

const guarded = (action) => action().catch((error) => complain(error.message));

field("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  guarded(submit);
});
field("model").addEventListener("change", () => {
  if (field("model").value) field("chosen").textContent = "";
});
field("mode").addEventListener("change", () => {
  const searches = field("mode").value === "search";
  for (const id of ["mesh", "strategy"]) field(id).disabled = searches;
});
field("file").addEventListener("change", (event) => guarded(async () => complain(await take(event.target.files[0]))));
for (const kind of ["dragover", "dragleave", "drop"]) {
  field("drop").addEventListener(kind, (event) => {
    event.preventDefault();
    field("drop").classList.toggle("over", kind === "dragover");
    if (kind === "drop" && event.dataTransfer.files.length) guarded(async () => complain(await take(event.dataTransfer.files[0])));
  });
}
guarded(async () => {
  offer(await call("/api/choices"));
  const known = await call("/api/plans");
  await Promise.all(known.plans.map((job) => watch(job.id)));
});
