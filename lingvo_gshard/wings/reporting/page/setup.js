// How runs were started: commands, environments, compilations and hyperparameters.

function setupSection() {
  return section("setup", "Setup", isComparison ? differencesTable() : null, runs.map(setupOf), programsTable(), paramsTable());
}

function setupOf(run, index) {
  const launch = newestLaunch(run);
  const head = isComparison ? el("h3", {}, runName(index)) : null;
  if (!launch) return el("div", { class: "setup" }, head, el("p", { class: "muted" }, "The command and the environment were not recorded: the run was trained by an earlier version."));
  const versions = Object.entries(launch.versions).map(([name, version]) => `${name} ${version}`).join(", ");
  const settings = Object.entries(launch.environment);
  const rows = [
    ["Started in", launch.directory], ["Host", `${launch.host}${launch.processes > 1 ? `, ${count(launch.processes)} processes` : ""}`],
    ["Devices", `${launch.devices}, ${launch.runtime} runtime`], ["Versions", versions],
    ["Environment", settings.length ? settings.map(([name, value]) => el("code", { class: "setting" }, `${name}=${value}`)) : "no setting of jax, XLA or TensorFlow"],
  ];
  return el("div", { class: "setup" }, head, el("pre", { class: "command", tabindex: "0" }, launch.command),
    el("dl", { class: "facts-list" }, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    run.launches.length > 1 ? launchesTable(run, index) : null);
}

function launchesTable(run, index) {
  const columns = [
    column("Started", (row) => row.time, { number: true, show: times }), numeric("After step", "step", count), numeric("To step", "steps", count),
    field("Devices", "devices"), field("Host", "host"), field("Command", "command", { wide: true, show: code }),
  ];
  return dataTable(columns, run.launches, { id: `launches-${index}`, caption: "launches" });
}

function differencesTable() {
  if (!report.differences.length) return el("p", { class: "lead" }, "The runs have the same hyperparameters.");
  const columns = [field("Hyperparameter", "path", { wide: true, show: code }),
    ...runs.map((_, index) => column(runs[index].label, (row) => row.values[index], { wide: true, show: code }))];
  return el("div", {}, el("h3", {}, "What differs"), dataTable(columns, report.differences, { id: "differences", caption: "differences" }));
}

function programsTable() {
  const rows = runs.flatMap((run, index) => run.programs.map((one) => ({ ...one, run: index, seconds: one.tracing + one.lowering + one.compiling })));
  if (!rows.length) return null;
  const columns = [
    ...(isComparison ? [column("Run", (row) => runs[row.run].label, { show: (_, row) => runName(row.run) })] : []),
    field("Function", "function"), numeric("For step", "step", count), numeric("Seconds", "seconds", seconds, { bar: true }),
    numeric("Tracing", "tracing", seconds), numeric("Lowering", "lowering", seconds), numeric("Compiling", "compiling", seconds),
    column("From the cache", (row) => (row.is_cached ? "yes" : "no")),
    column("Memory", (row) => row.memory?.peak, { number: true, show: bytes, title: "peak on one device, as XLA planned it" }),
    column("Inputs", (row) => changedInputs(rows, row), { wide: true }),
  ];
  return el("div", {}, el("h3", {}, "Compiled programs"), dataTable(columns, rows, { id: "programs", caption: "programs" }));
}

// How the inputs of a program differ from those of the function's program before it.
function changedInputs(rows, row) {
  const before = rows.slice(0, rows.indexOf(row)).findLast((one) => one.run === row.run && one.function === row.function);
  const names = Object.keys(row.inputs);
  if (!before) return names.length ? `${count(names.length)} arrays` : "";
  const changed = names.filter((name) => row.inputs[name] !== before.inputs[name]);
  return changed.length ? changed.map((name) => `${name} ${before.inputs[name] ?? MISSING} → ${row.inputs[name]}`).join(", ") : "as before";
}

function paramsTable() {
  const [run] = runs;
  const rows = Object.entries(run.params).map(([path, value]) => ({ path, value }));
  if (isComparison || !rows.length) return null;
  return el("details", {}, el("summary", {}, `All ${count(rows.length)} hyperparameters`),
    dataTable([field("Hyperparameter", "path", { wide: true, show: code }), field("Value", "value", { wide: true, show: code })], rows, { id: "params", caption: "hyperparameters", first: 0 }));
}
