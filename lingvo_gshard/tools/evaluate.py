"""Scores a trained model: of translations chrF and BLEU, of both tasks how it expects the text.

    gshard-evaluate --logdir=runs/quickstart
    gshard-evaluate --logdir=runs/quickstart --split=dev --languages=es,de
    gshard-evaluate --logdir=runs/quickstart --json=scores.json --output=translations.tsv

Beside the model's scores stand two that any reader can judge them by: the same model's on shuffled
sources (each row gets the translation of another row's source of the same language: what remains is
what the model scores without reading its input), and those of the source copied as it is. The
average is over the languages with 20 rows or more, each counting the same. Translations are found
by beam search; --beam_size=1 decodes greedily.

Of a language model the scores are bits per byte of the text (in UTF-8), perplexity per word and per
token; what the model says of the ends of documents is counted, the ends themselves are not bytes.

    gshard-evaluate --logdir=runs/language_model --json=scores.json

The run is read from --logdir alone: its Params, its vocabularies and its newest whole checkpoint.
"""

from __future__ import annotations

import collections
import dataclasses
import math

import numpy as np
import rich.console
import rich.table
from absl import flags

from lingvo_gshard.api.run import Run, TrainedModel, load
from lingvo_gshard.core.config import names
from lingvo_gshard.data.batching import mixing
from lingvo_gshard.data.sources.readers import SPLITS
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.decoding import Translator, scoring
from lingvo_gshard.tasks import LanguageModelTask, TranslationTask
from lingvo_gshard.tools.console import output, startup
from lingvo_gshard.tools.console.progress import Progress
from lingvo_gshard.tools.flags.decoding import decoding_options, define_decoding_flags
from lingvo_gshard.tools.flags.run import define_logdir_flag, required_logdir
from lingvo_gshard.tools.flags.runtime import define_runtime_flags, runtime_options
from lingvo_gshard.tools.runs import perplexity, text_scores

NAME = "gshard-evaluate"
_SAMPLES = 5


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Everything that was found out about one split."""

    rows: list[Row]
    translations: list[str]
    cut: int
    scores: dict[str, scoring.LanguageScores]
    expectation: perplexity.Expectation


def define_flags() -> flags.FlagValues:
    """Returns this program's flags."""
    values = flags.FlagValues()
    define_logdir_flag(values)
    flags.DEFINE_string("split", "test", "train, dev or test.", flag_values=values)
    flags.DEFINE_list(
        "languages",
        [],
        "Languages to score, as es,de; all there are if not given.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "max_rows_per_language",
        None,
        "Scores a fixed random choice of so many rows of each.",
        1,
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "shuffled", True, "Also scores shuffled sources; --noshuffled does not.", flag_values=values
    )
    output.define_json_flag(values, "all scores")
    flags.DEFINE_string(
        "output",
        None,
        "File to write to, tab-separated: language, source, reference, translation.",
        flag_values=values,
    )
    define_decoding_flags(values)
    define_runtime_flags(values)
    return values


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    values = define_flags()
    startup.parse_flags(values, argv, __doc__)
    if values.split not in SPLITS:
        hint = names.nearest(values.split, SPLITS)
        raise ValueError(f"--split={values.split} is unknown. {hint}")
    run = load(required_logdir(values), options=runtime_options(values))
    run.check_task(TranslationTask, LanguageModelTask)
    is_language_model = issubclass(run.params.task.cls, LanguageModelTask)
    if is_language_model:
        text_scores.check_flags(values, run.params.name)
    with run:
        if is_language_model:
            return _evaluate_language_model(values, run)
        return _evaluate_run(values, run)


def _evaluate_language_model(values: flags.FlagValues, run: Run) -> int:
    console = _console(values, run)
    trained = run.model
    title = f"{run.params.name}, step {trained.step:,}"
    scores = text_scores.evaluate(trained, values.split, console, title)
    if run.backend.is_main and values.json:
        _write_json(values, run, trained, scores)
    return 0


def _evaluate_run(values: flags.FlagValues, run: Run) -> int:
    console = _console(values, run)
    rows = choose_rows(
        run.input.rows(values.split), values.split, values.languages, values.max_rows_per_language
    )
    trained = run.model
    _say(console, f"{run.params.name}, step {trained.step:,}: {len(rows):,} rows of {values.split}")
    translator = run.translator(decoding_options(values))
    evaluation = evaluate(run.params, trained, translator, rows, values.shuffled, console)
    _print(console, evaluation)
    if run.backend.is_main:
        if values.json:
            _write_json(values, run, trained, to_record(evaluation))
        if values.output:
            columns = zip(evaluation.rows, evaluation.translations, strict=True)
            lines = ("\t".join((*row[:3], text)) + "\n" for row, text in columns)
            output.write_text(values.output, "".join(lines), "output")
    return 0


def _write_json(values: flags.FlagValues, run: Run, trained: TrainedModel, scores: dict) -> None:
    record = {"logdir": values.logdir, "experiment": run.params.name, "step": trained.step}
    record |= {"split": values.split, **scores}
    output.write_json(values.json, record)


def _console(values: flags.FlagValues, run: Run) -> rich.console.Console:
    console = output.make_console(values.json)
    console.quiet = not run.backend.is_main
    return console


def choose_rows(rows: list[Row], split: str, languages: list[str], most: int | None) -> list[Row]:
    """Returns the rows of these languages (all if none is named), at most `most` of each.

    Raises ValueError with the nearest name for a language that has no row.
    """
    by_language = collections.defaultdict(list)
    for row in rows:
        by_language[row.language].append(row)
    for language in languages:
        if language not in by_language:
            hint = names.nearest(language, by_language)
            raise ValueError(f"--languages: {split} has no rows of {language!r}. {hint}")
    chosen = []
    for language in languages or sorted(by_language):
        members = by_language[language]
        kept = np.sort(mixing.permutation(len(members), 0)[: most or len(members)])
        chosen += [members[index] for index in kept]
    if not chosen:
        raise ValueError(f"--split={split}: the run's corpus has no rows in it")
    return chosen


def evaluate(
    params,
    trained: TrainedModel,
    translator: Translator,
    rows: list[Row],
    with_shuffled: bool,
    console: rich.console.Console,
) -> Evaluation:
    """Translates the rows and scores them."""
    with Progress(console, "Cross-entropy", "rows", len(rows)) as progress:
        expectation = perplexity.measure(params, trained, rows, progress.update)
    sources = [row.source for row in rows]
    with Progress(console, "Translating", "rows", len(rows)) as progress:
        translations = translator.translate(sources, progress.update)
    scores = scoring.score_languages(
        [row.language for row in rows],
        sources,
        [row.target for row in rows],
        translations.texts,
        with_shuffled,
    )
    return Evaluation(rows, translations.texts, len(translations.cut), scores, expectation)


def to_record(evaluation: Evaluation) -> dict:
    """Returns an evaluation as JSON values, its translations left out."""
    mean, averaged = scoring.average(evaluation.scores)
    expectation = dataclasses.asdict(evaluation.expectation)
    return {
        "rows": len(evaluation.rows),
        "sources_cut": evaluation.cut,
        **{name: value if math.isfinite(value) else None for name, value in expectation.items()},
        "average": mean and dataclasses.asdict(mean),
        "averaged_languages": averaged,
        "languages": {name: dataclasses.asdict(found) for name, found in evaluation.scores.items()},
        "signatures": scoring.signatures(),
    }


def _print(console: rich.console.Console, evaluation: Evaluation) -> None:
    mean, averaged = scoring.average(evaluation.scores)
    console.print(_table(evaluation.scores, mean))
    least = scoring.LEAST_ROWS
    if mean is None:
        _say(console, f"No average: no language has {least} rows or more.")
    elif len(averaged) < len(evaluation.scores):
        _say(
            console,
            f"The average is over the {len(averaged)} of {len(evaluation.scores)} languages with "
            f"{least} rows or more.",
        )
    found = evaluation.expectation
    _say(
        console,
        f"cross-entropy {found.cross_entropy:.4f} nats  perplexity {found.perplexity:.2f}  "
        f"token accuracy {found.accuracy:.4f}  over {found.tokens:,} tokens",
    )
    for name, signature in scoring.signatures().items():
        _say(console, f"{name}: sacrebleu {signature}")
    if found.rows_too_long:
        _say(console, f"{found.rows_too_long} rows are too long for the cross-entropy: left out.")
    if evaluation.cut:
        _say(console, f"Warning: {evaluation.cut} sources were too long and were cut.")
    _print_samples(console, evaluation)


def _table(
    scores: dict[str, scoring.LanguageScores], mean: scoring.LanguageScores | None
) -> rich.table.Table:
    with_shuffled = any(found.shuffled for found in scores.values())
    table = rich.table.Table()
    table.add_column("language")
    heads = ["rows", "chrF", "BLEU"]
    heads += ["shuffled\nchrF", "shuffled\nBLEU"] if with_shuffled else []
    for head in (*heads, "copied\nchrF", "copied\nBLEU"):
        table.add_column(head, justify="right")
    for name, found in scores.items():
        table.add_row(name, *_cells(found, with_shuffled))
    if mean is not None:
        table.add_section()
        table.add_row("average", *_cells(mean, with_shuffled), style="bold")
    return table


def _cells(found: scoring.LanguageScores, with_shuffled: bool) -> list[str]:
    cells = [f"{found.rows:,}"]
    shown = [found.translated, *([found.shuffled] if with_shuffled else []), found.copied]
    for score in shown:
        cells += [f"{score.chrf:.1f}", f"{score.bleu:.1f}"] if score else ["-", "-"]
    return cells


def _print_samples(console: rich.console.Console, evaluation: Evaluation) -> None:
    count = len(evaluation.rows)
    for number in range(min(_SAMPLES, count)):
        index = (2 * number + 1) * count // (2 * min(_SAMPLES, count))
        row = evaluation.rows[index]
        _say(console, f"\n{row.language:>11}  {row.source}\n  reference  {row.target}")
        _say(console, f"translation  {evaluation.translations[index]}")


def _say(console: rich.console.Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
