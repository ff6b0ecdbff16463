"""Translates lines: each line of --input or standard input gives one line of output."""

from __future__ import annotations

import functools
import json
from typing import Any, TextIO

from absl import flags

from lingvo_gshard.api.run import Run
from lingvo_gshard.core import UserError
from lingvo_gshard.tools.console import LineProgress, output, startup, warn
from lingvo_gshard.tools.console.line_command import LINE_FLAGS, answer_with_run, write_lines
from lingvo_gshard.tools.flags.definitions import maker, string
from lingvo_gshard.tools.flags.options import option_flags
from lingvo_gshard.tools.flags.run import CHECKPOINT, LOGDIR, precision_flag, runtime_flags
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.translator import Translation, Translator
from lingvo_gshard.wings.preparation.published_inputs import PublishedTranslationInput

_LANGUAGES = {
    f"{side}_language": string(
        f"Code of the language of {texts}, of an imported model for many languages; by default "
        f"the run's input.{side}_language.",
        "",
    )
    for side, texts in (("source", "the lines"), ("target", "the translations"))
}
define_flags = maker(
    logdir=LOGDIR,
    checkpoint=CHECKPOINT,
    **LINE_FLAGS,
    **option_flags(DecodingOptions(), notes={"best": "Shown with --json alone."}),
    precision=precision_flag(),
    prefix=string("What every translation must begin with.", ""),
    **_LANGUAGES,
    json=output.json_flag("a line for each line"),
    **runtime_flags(in_cluster=False),
)


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    values = startup.parse_flags(define_flags(), argv, __doc__, __name__)
    return answer_with_run(
        values,
        "Translating",
        "a line to translate",
        Translator,
        DecodingOptions(),
        functools.partial(_open_translator, values),
        _respond,
    )


def _open_translator(values: flags.FlagValues, run: Run, options: DecodingOptions) -> Translator:
    given: dict[str, Any] = {
        side: values[f"{side}_language"].value for side in ("source", "target")
    }
    side = next(filter(given.get, given), None)
    if side:
        if not issubclass(run.params.input.cls, PublishedTranslationInput):
            raise UserError(
                f"--{side}_language={given[side]} applies to imported models for many languages; "
                f"the run of {run.params.name} has one vocabulary for all"
            )
        input_ = run.decoder.input
        assert isinstance(input_, PublishedTranslationInput)
        input_.use_languages(**given)
    return run.translator(options)


def _respond(
    translator: Translator,
    values: flags.FlagValues,
    records: TextIO | None,
    progress: LineProgress,
    sentences: list[str],
    before: int,
) -> None:
    """Translates a batch of input lines and writes the translations.

    If --json is standard output, that gets JSON, not translations.
    """
    prefixes = [values.prefix] * len(sentences)
    translations = translator.translate(sentences, progress, prefixes=prefixes)
    progress.before_answers()
    for index in translations.cut:
        warn(
            f"Warning: line {before + index + 1} is longer than {translator.longest} tokens and "
            "was cut"
        )
    _warn_of_empty(sentences, translations.texts, before)
    found = map(_record, sentences, translations.texts, translations.best)
    lines = [json.dumps(record, ensure_ascii=False) for record in found]
    write_lines(lines if values.json == output.STANDARD_OUTPUT else translations.texts)
    if records is not None:
        records.writelines(f"{line}\n" for line in lines)
        records.flush()


def _warn_of_empty(sentences: list[str], texts: list[str], before: int) -> None:
    """Warns if lines that are not empty have empty translations."""
    pairs = enumerate(zip(sentences, texts, strict=True), start=before + 1)
    empty = [line for line, (source, text) in pairs if source.strip() and not text.strip()]
    if empty:
        which = f"line {empty[0]} has" if len(empty) == 1 else f"{len(empty)} lines have"
        first = "" if len(empty) == 1 else f" (the first is line {empty[0]})"
        warn(
            f"Warning: {which} an empty translation{first}: the model ends it at once, as after "
            "a short training; `least_tokens=2` has it choose another token first"
        )


def _record(source: str, text: str, best: list[Translation]) -> dict[str, object]:
    """Returns the JSON object of a line; see the command's help."""
    return {
        "source": source.rstrip("\r\n"),
        "translation": text,
        "best": [
            {
                "text": found.text,
                "score": found.score,
                "tokens": found.pieces,
                "log_probabilities": found.log_probabilities,
                **({} if found.seed is None else {"seed": found.seed}),
            }
            for found in best
        ],
    }
