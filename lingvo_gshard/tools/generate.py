"""Continues texts with a language model: each line of standard input is the beginning of a text.

    echo "Cannot open" | gshard-generate --logdir=runs/language_model
    gshard-generate --logdir=runs/language_model --samples=3 --temperature=0.8 < beginnings.txt
    gshard-generate --logdir=runs/language_model --json < beginnings.txt > texts.jsonl
    gshard-generate --logdir=runs/language_model          and type lines; Ctrl-D ends

Each line gives --samples lines of output, in order. Each is the whole text, including its
beginning. For an empty line the model begins the text itself. In the output, a line break within a
text is written as backslash-n and a backslash as two. With --json, each line of output is
{"beginning", "texts"} instead; --json=FILE writes these lines to a file beside the texts.

Tokens are drawn by the probabilities that the model gives them; --temperature, --top_k and --top_p
change these. The result depends only on the beginning, the number of the sample and --seed. A text
ends where the model ends it, or when it has as many tokens as a row had in training. If a beginning
leaves no room, the model sees only its end, and a warning is printed.

Exit code: 0 if every line was answered, else 1.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import TextIO

from absl import flags

from lingvo_gshard.api.run import load
from lingvo_gshard.inference.writer import Text, Writer
from lingvo_gshard.tools.console import output, startup
from lingvo_gshard.tools.console.line_input import (
    LineReader,
    answer_lines,
    define_line_flags,
    skips_bad_lines,
    standard_input,
    warn,
    write_lines,
)
from lingvo_gshard.tools.console.terminal_progress import LineProgress
from lingvo_gshard.tools.flags.decoding import (
    define_precision_flag,
    define_sampling_flags,
    sampling_options,
)
from lingvo_gshard.tools.flags.run import define_logdir_flag, required_logdir
from lingvo_gshard.tools.flags.runtime import define_runtime_flags, runtime_options

NAME = "gshard-generate"


def define_flags() -> flags.FlagValues:
    """Returns this command's flags."""
    values = flags.FlagValues()
    define_logdir_flag(values)
    define_sampling_flags(values)
    define_precision_flag(values)
    output.define_json_flag(values, "a line for each beginning")
    define_line_flags(values)
    define_runtime_flags(values, in_cluster=False)
    return values


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    values = define_flags()
    startup.parse_flags(values, argv, __doc__)
    output.check_writable(values, "json")
    skip_bad = skips_bad_lines(values)
    stream = standard_input()
    logdir = required_logdir(values)
    with LineProgress("Writing") as progress, output.open_json_lines(values.json) as records:
        run = load(logdir, options=runtime_options(values), precision=values.precision)
        run.observer = progress.stages
        run.check_decoder(Writer)
        options = sampling_options(values)
        lines = LineReader(stream)
        writer = run.writer(options)
        progress.rest()
        if sys.stdin.isatty():
            warn(f"{run.params.name}, step {run.step:,}. Type a beginning; Ctrl-D ends.")
        respond = functools.partial(_respond, writer, values.json, records, progress)
        return answer_lines(lines, respond, skip_bad, progress)


def _respond(
    writer: Writer,
    path: str | None,
    records: TextIO | None,
    progress: LineProgress,
    lines: list[str],
    before: int,
) -> None:
    """Writes the texts for a batch of lines, each as soon as it is complete.

    Args:
      writer: the model.
      path: --json. If it is standard output, that gets JSON instead of texts.
      records: the file for JSON, if there is one.
      progress: shows how many lines are done.
      lines: the beginnings.
      before: number of lines before them.
    """
    beginnings = [line.rstrip("\r\n") for line in lines]
    pairs = zip(beginnings, writer.write(beginnings), strict=True)
    for number, (beginning, text) in enumerate(pairs, start=before + 1):
        if text.cut:
            warn(
                f"Warning: line {number} leaves no room: the model did not see its first "
                f"{text.cut} tokens"
            )
        progress.update(number - before)
        progress.before_answers()
        record = _record(beginning, text)
        as_json = path == output.STANDARD_OUTPUT
        write_lines([record] if as_json else map(_on_one_line, text.samples))
        if records is not None:
            records.write(f"{record}\n")
            records.flush()


def _record(beginning: str, text: Text) -> str:
    return json.dumps({"beginning": beginning, "texts": text.samples}, ensure_ascii=False)


def _on_one_line(text: str) -> str:
    """Returns a text with its backslashes and line breaks escaped."""
    return text.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")
