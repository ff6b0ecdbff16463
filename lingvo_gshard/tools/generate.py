"""Continues texts with a language model: each line of --input or standard input is a beginning."""

from __future__ import annotations

import functools
import json
from typing import TextIO

from absl import flags

from lingvo_gshard.api.run import Run
from lingvo_gshard.core import UserError
from lingvo_gshard.tools.console import LineProgress, output, startup, warn
from lingvo_gshard.tools.console.line_command import LINE_FLAGS, answer_with_run, write, write_lines
from lingvo_gshard.tools.flags.definitions import maker, switch
from lingvo_gshard.tools.flags.options import option_flags
from lingvo_gshard.tools.flags.run import CHECKPOINT, LOGDIR, precision_flag, runtime_flags
from lingvo_gshard.wings.inference.options import DRAWING, DecodingOptions
from lingvo_gshard.wings.inference.text_generator import Text, TextGenerator

define_flags = maker(
    logdir=LOGDIR,
    checkpoint=CHECKPOINT,
    stream=switch("Shows each text while it is generated."),
    **option_flags(DRAWING),
    precision=precision_flag(),
    json=output.json_flag("a line for each beginning"),
    **LINE_FLAGS,
    **runtime_flags(in_cluster=False),
)


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    values = startup.parse_flags(define_flags(), argv, __doc__, __name__)
    open_generator = functools.partial(_open_generator, values)
    return answer_with_run(
        values, "Writing", "a beginning", TextGenerator, DRAWING, open_generator, _respond
    )


def _open_generator(values: flags.FlagValues, run: Run, options: DecodingOptions) -> TextGenerator:
    if values.stream and not _can_stream(values):
        raise UserError(
            "--stream shows one text at a time: it needs --best=1 and --beam_size=1, and --json "
            "only with a file"
        )
    return run.text_generator(options)


def _can_stream(values: flags.FlagValues) -> bool:
    return values.best == values.beam_size == 1 and values.json != output.STANDARD_OUTPUT


def _respond(
    generator: TextGenerator,
    values: flags.FlagValues,
    records: TextIO | None,
    progress: LineProgress,
    lines: list[str],
    before: int,
) -> None:
    """Writes the texts for a batch of lines, each as soon as it is complete."""
    beginnings = [line.rstrip("\r\n") for line in lines]
    streams = values.stream or (len(lines) == 1 and _can_stream(values) and not generator.has_beam)
    texts = map(functools.partial(_streamed, generator, progress), beginnings) if streams else None
    pairs = zip(beginnings, texts or generator.write(beginnings), strict=True)
    for number, (beginning, text) in enumerate(pairs, start=before + 1):
        if text.cut:
            warn(
                f"Warning: line {number} leaves no room: the model did not see its first "
                f"{text.cut} tokens"
            )
        progress.update(number - before)
        progress.before_answers()
        if len(lines) == 1 and text.seed is not None and not values["seed"].present:
            warn(f"Seed {text.seed}: --seed={text.seed} writes this again")
        record = _record(generator, beginning, text)
        if not streams:
            as_json = values.json == output.STANDARD_OUTPUT
            write_lines([record] if as_json else map(_on_one_line, text.texts))
        if records is not None:
            records.write(f"{record}\n")
            records.flush()


def _streamed(generator: TextGenerator, progress: LineProgress, beginning: str) -> Text:
    """Writes the text of a beginning while it is generated, and returns it."""

    def show(piece: str) -> None:
        progress.before_answers()
        write(_on_one_line(piece))

    text = generator.write_streamed(beginning, show)
    write("\n")
    return text


def _record(generator: TextGenerator, beginning: str, text: Text) -> str:
    """Returns the JSON object of a line; see the command's help."""
    best = [
        {
            "text": whole,
            "score": found.score,
            "reason": found.reason,
            "tokens": generator.pieces(found),
            "log_probabilities": found.log_probabilities,
        }
        for whole, found in zip(text.texts, text.hypotheses, strict=True)
    ]
    record = {"beginning": beginning, "texts": text.texts, "best": best}
    if text.seed is not None:
        record["seed"] = text.seed
    return json.dumps(record, ensure_ascii=False)


def _on_one_line(text: str) -> str:
    """Returns a text with its backslashes and line breaks escaped."""
    return text.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")
