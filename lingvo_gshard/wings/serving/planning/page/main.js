// The list of plans, their progress, and those that are compared.

const POLL = 700;
const jobs = new Map();
const chosen = new Set();

function complain(text) {
  field("problem").textContent = text;
  field("problem").hidden = !text;
}

function stateOf(job) {
  if (job.state === "done") return inWords(job.answer.plans[0]);
  if (job.state === "failed") return "failed";
  if (job.state === "waiting") return "waits";
  return `${job.stage || "begins"}, ${Math.round(job.seconds || 0)} s`;
}

function inWords(plan) {
  const fits = plan.fits ? "fits" : "does not fit";
  const spent = isNumber(plan.budget?.price) ? `, ${large(plan.budget.price)} ${plan.budget.currency} for ${large(plan.budget.tokens)} tokens` : "";
  return `${fits} in ${bytes(plan.bytes_per_device.peak)} of ${bytes(plan.bytes_per_device.capacity)}, ${seconds(plan.seconds_per_step)} a step${spent}`;
}

// What was warned of, what does not fit, and what does in its place.
function remarks(job) {
  if (job.state === "failed") return [el("p", { class: "bad" }, coded(job.problem))];
  if (job.state !== "done") return [];
  const { plans, problem, warnings } = job.answer;
  const tried = plans[0].remedies;
  const others = plans.filter((plan) => plan.change);
  const failed = tried.filter((row) => !row.fits);
  return [
    ...warnings.map((text) => el("p", { class: "bad" }, "Warning: ", coded(text))),
    problem ? el("p", { class: "bad" }, "As asked there is no plan: ", coded(problem)) : null,
    ...(job.request.mode === "generate" ? [] : others.map((plan) => el("p", { class: "fitting" }, "With ", coded(plan.change), ` it ${inWords(plan)}.`))),
    failed.length ? el("details", {}, el("summary", {}, `Tried, and does not fit: ${count(failed.length)}`),
      el("ul", {}, failed.map((row) => el("li", {}, coded(row.change), row.reason ? [": ", coded(row.reason)] : `: ${bytes(row.peak)}`)))) : null,
  ];
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
    el("span", { class: `state ${job.state === "failed" ? "bad" : ""}` }, coded(stateOf(job))),
    job.state === "done" ? el("a", { class: "quiet", href: `/saved?plans=${job.id}`, download: "" }, "Save") : null,
    el("button", { class: "quiet remove", type: "button", onclick: () => guarded(() => remove(job.id)) }, isOpen ? "Cancel" : "Remove"),
    el("div", { class: "remarks" }, remarks(job)));
}

async function remove(id) {
  jobs.delete(id);
  chosen.delete(id);
  draw();
  compare();
  await call(`/api/plans/${id}`, null, "DELETE");
}

function compare() {
  const ids = [...jobs.keys()].filter((id) => chosen.has(id) && jobs.get(id).state === "done");
  field("comparison").hidden = !ids.length;
  field("save").href = `/saved?plans=${ids.join(",")}`;
  const shown = ids.map((id) => jobs.get(id));
  const plans = shown.flatMap((job) => job.answer.plans);
  const names = shown.flatMap((job) => job.answer.plans.map(() => job.model));
  field("table").replaceChildren(...(ids.length ? [comparison(plans, names), ...notes(plans, names)] : []));
}

function draw() {
  field("plans").hidden = !jobs.size;
  field("jobs").replaceChildren(...[...jobs.values()].reverse().map(item));
}

async function watch(id) {
  for (;;) {
    if (!jobs.has(id)) return;
    let job;
    try {
      job = await call(`/api/plans/${id}`);
    } catch (error) {
      // It was removed meanwhile.
      if (!jobs.has(id)) return;
      throw error;
    }
    if (!jobs.has(id)) return;
    jobs.set(id, job);
    if (job.state === "done") chosen.add(id);
    draw();
    if (job.state === "done" || job.state === "failed") break;
    await new Promise((resolve) => setTimeout(resolve, POLL));
  }
  compare();
}

// What was planned comes with the next answer.
const asOpen = (job) => (job.state === "done" ? { ...job, state: "running" } : job);

async function submit() {
  complain("");
  const job = await call("/api/plans", request());
  jobs.delete(job.id);
  jobs.set(job.id, asOpen(job));
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
field("mode").addEventListener("change", adapt);
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
  for (const job of known.plans) jobs.set(job.id, asOpen(job));
  await Promise.all(known.plans.map((job) => watch(job.id)));
});
