// Scores of gshard-evaluate.

const METRICS = [["chrf", "chrF"], ["bleu", "BLEU"]];
const NUMBERS = [["cross_entropy", "Cross-entropy"], ["perplexity", "Perplexity"], ["accuracy", "Accuracy"], ["bits_per_byte", "Bits per byte"], ["perplexity_per_word", "Perplexity per word"]];

const allScores = runs.flatMap((run, index) => run.evaluations.map((row) => ({ ...row, run: index })));

function scoresSection() {
  const dev = runs.some((run) => Object.keys(run.history.dev).length);
  if (!allScores.length) {
    return section("scores", "Scores", el("p", { class: "muted" }, `No evaluation is recorded${dev ? ", but those of the dev split, which the curves show" : ""}. `, el("code", {}, `gshard-evaluate --logdir=${runs[0].logdir}`), " scores a run; the next report has the scores."));
  }
  const translated = allScores.filter((row) => row.scores.languages);
  return section("scores", "Scores", translated.length ? languageScores(translated) : null, scoreTable());
}

function scoreTable() {
  const has = (name) => allScores.some((row) => isNumber(row.scores[name]));
  const columns = [
    ...(isComparison ? [column("Run", (row) => runs[row.run].label, { show: (_, row) => runName(row.run) })] : []),
    column("Evaluated", (row) => row.time, { number: true, show: times }), numeric("Step", "step", count), field("Split", "split"), field("Size", "size"), field("Precision", "precision"),
    ...METRICS.filter(([name]) => allScores.some((row) => isNumber(row.scores.average?.translated?.[name])))
      .map(([name, title]) => column(`${title}, average`, (row) => row.scores.average?.translated?.[name], { number: true, show: oneDigit })),
    ...NUMBERS.filter(([name]) => has(name)).map(([name, title]) => column(title, (row) => row.scores[name], { number: true, show: compact })),
    column("Options", optionsText, { wide: true }),
  ];
  return dataTable(columns, allScores, { id: "evaluations", caption: "evaluations", first: isComparison ? 1 : 0 });
}

function optionsText(row) {
  const given = Object.entries(row.options).filter(([, value]) => !(Array.isArray(value) && !value.length));
  return given.map(([name, value]) => `${name}=${Array.isArray(value) ? value.join(",") : value}`).join(" ");
}

const oneDigit = (value) => (isNumber(value) ? value.toFixed(1) : MISSING);

// Bars by language, of the newest evaluation of each run.
function languageScores(rows) {
  const newest = [...new Map(rows.map((row) => [row.run, row])).values()];
  const names = [...new Set(newest.flatMap((row) => Object.keys(row.scores.languages)))];
  const area = el("div", {});
  const draw = (metric) => area.replaceChildren(...languageBars(newest, names, metric));
  draw("chrf");
  const what = newest.map((row) => `${isComparison ? `${runs[row.run].label}: ` : ""}step ${count(row.step)}, ${row.size} of ${row.split}`).join("; ");
  return [
    el("div", { class: "tools" }, switchOf("Score", METRICS, "chrf", draw), el("span", { class: "hint" }, `${what}`)), area];
}

function languageBars(rows, names, metric) {
  const baseline = (scores) => Math.max(scores.copied?.[metric] ?? 0, scores.shuffled?.[metric] ?? 0);
  const all = rows.flatMap((row) => Object.values(row.scores.languages).flatMap((scores) => [scores.translated[metric], baseline(scores)]));
  const most = Math.min(100, Math.max(10, Math.ceil(Math.max(...all) / 10) * 10));
  const place = (value) => `${Math.min(100, (value / most) * 100)}%`;
  const groups = names.map((name) => el("li", {}, el("span", { class: "name" }, name), el("div", { class: "bars" }, rows.map((row) => {
    const scores = row.scores.languages[name];
    if (!scores) return null;
    const value = scores.translated[metric];
    const bar = el("div", { class: "scorebar" }, el("div", { class: "track" },
      el("div", { class: `length ${runColor(row.run)}`, style: { width: place(value) } }),
      el("div", { class: "baseline", style: { left: place(baseline(scores)) } })), el("b", {}, oneDigit(value)));
    return explain(bar, [`${isComparison ? `${runs[row.run].label}, ` : ""}${name}`, `${oneDigit(value)} on ${count(scores.rows)} rows`, `sources copied: ${oneDigit(scores.copied?.[metric])}`, scores.shuffled ? `shuffled: ${oneDigit(scores.shuffled[metric])}` : null].filter(Boolean));
  }))));
  const ticks = linearTicks(0, most, 5);
  const axis = el("li", { class: "axis", "aria-hidden": "true" }, el("span", {}), el("div", { class: "scorebar" }, el("div", { class: "ticks" }, ticks.map((value) => el("span", { style: { left: place(value) } }, count(value))))));
  return [el("ul", { class: "languages" }, groups, axis), el("p", { class: "muted key" }, el("span", { class: "baseline" }), "the score of a model that does not read its input: sources copied, or translations of other rows, whichever is better")];
}
