"""Writes texts with a language model, each from a beginning: a line of standard input.

    echo "Cannot open" | gshard-generate --logdir=runs/language_model
    gshard-generate --logdir=runs/language_model --samples=3 --temperature=0.8 < beginnings.txt
    gshard-generate --logdir=runs/language_model --json < beginnings.txt > texts.jsonl
    gshard-generate --logdir=runs/language_model          and type; Ctrl-D ends

Every line in gives --samples lines out, in order: the whole text, the beginning with it. An empty
line is answered with texts that the model begins itself. A line break within a text is written as
a backslash and n, a backslash as two; with --json each line out is {"beginning", "texts"} instead.

Each token is drawn by the probability that the model gives it, of all tokens or of the likeliest,
see --temperature, --top_k and --top_p. What is drawn depends on the beginning, the number of the
sample and --seed alone, so that the same call gives the same texts, whatever other lines there are.
A text ends where the model says so, or where its row is full: as many tokens as a row of the run
had. Of a beginning that leaves no room the model sees only the end, and a warning says so.

Exit code: 0 if every line was answered; 1 otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys

from absl import flags

from lingvo_gshard.api.options import SamplingOptions
from lingvo_gshard.api.run import load
from lingvo_gshard.decoding import Text, Writer
from lingvo_gshard.tools.console import startup
from lingvo_gshard.tools.console.line_input import (
    Lines,
    answer,
    define_line_flags,
    skips_bad_lines,
    warn,
    write,
)
from lingvo_gshard.tools.flags.run import define_logdir_flag, required_logdir
from lingvo_gshard.tools.flags.runtime import define_runtime_flags, runtime_options

NAME = "gshard-generate"

# One that types waits for one text, a pipe's lines are written on together.
_ROWS_TYPED, _ROWS_PIPED = 1, 16


def define_flags() -> flags.FlagValues:
    """Returns this program's flags."""
    values = flags.FlagValues()
    define_logdir_flag(values)
    flags.DEFINE_integer("samples", 1, "Texts to each beginning.", 1, flag_values=values)
    flags.DEFINE_integer(
        "most_tokens",
        0,
        "Tokens to be written of each; 0: until the row is full, and at least half of one.",
        0,
        flag_values=values,
    )
    flags.DEFINE_float(
        "temperature",
        1.0,
        "What logits are divided by: below 1 likely tokens are likelier still; 0 takes the "
        "likeliest.",
        0.0,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "top_k", 0, "So many of the likeliest tokens are drawn from; 0: all.", 0, flag_values=values
    )
    flags.DEFINE_float(
        "top_p",
        1.0,
        "The fewest tokens that together are so likely are drawn from; 1: all.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "seed", 0, "Another one draws other texts.", 0, 2**31 - 1, flag_values=values
    )
    flags.DEFINE_bool("json", False, "Write JSON, a line for each beginning.", flag_values=values)
    define_line_flags(values)
    define_runtime_flags(values, in_cluster=False)
    return values


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    values = define_flags()
    startup.parse_flags(values, argv, __doc__)
    skip_bad = skips_bad_lines(values)
    run = load(required_logdir(values), options=runtime_options(values))
    run.check_decoder(Writer)
    options = _sampling_options(values)
    lines = Lines(sys.stdin.buffer)
    typed = sys.stdin.isatty()
    writer = run.writer(options, _ROWS_TYPED if typed else _ROWS_PIPED)
    if typed:
        warn(f"{run.params.name}, step {run.step:,}. Type a beginning; Ctrl-D ends.")
    respond = functools.partial(_respond, writer, values.json)
    return answer(lines, respond, skip_bad)


def _sampling_options(values: flags.FlagValues) -> SamplingOptions:
    names = (field.name for field in dataclasses.fields(SamplingOptions))
    return SamplingOptions(**{name: values[name].value for name in names})


def _respond(writer: Writer, as_json: bool, lines: list[str], before: int) -> None:
    """Writes the texts to lines that come after so many others, each as soon as it is there."""
    beginnings = [line.rstrip("\r\n") for line in lines]
    pairs = zip(beginnings, writer.write(beginnings), strict=True)
    for number, (beginning, text) in enumerate(pairs, start=before + 1):
        if text.cut:
            warn(
                f"Warning: line {number} leaves no room: the model did not see its first "
                f"{text.cut} tokens"
            )
        write([_record(beginning, text)] if as_json else map(_on_one_line, text.samples))


def _record(beginning: str, text: Text) -> str:
    return json.dumps({"beginning": beginning, "texts": text.samples}, ensure_ascii=False)


def _on_one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")
