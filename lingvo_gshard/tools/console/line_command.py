"""Runs a command that answers lines with the model of a run, such as gshard-translate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TextIO, TypeVar

from absl import flags

from lingvo_gshard.api.run import Run, load
from lingvo_gshard.inference.options import DecodingOptions
from lingvo_gshard.inference.translator import Translator
from lingvo_gshard.inference.writer import Writer
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.console.harmless_text import warn
from lingvo_gshard.tools.console.line_input import (
    STANDARD_INPUT,
    LineReader,
    answer_lines,
    open_input,
    skips_bad_lines,
)
from lingvo_gshard.tools.console.terminal_progress import LineProgress
from lingvo_gshard.tools.flags.options import given_options
from lingvo_gshard.tools.flags.run import required_logdir
from lingvo_gshard.tools.flags.runtime import runtime_options

Decoder = TypeVar("Decoder", Translator, Writer)
# Answers a batch of lines, given the decoder, the flags, the file for JSON if there is one, the
# display, the lines, and the number of lines before them.
Respond = Callable[[Decoder, flags.FlagValues, TextIO | None, LineProgress, list[str], int], None]


def answer_with_run(
    values: flags.FlagValues,
    doing: str,
    wanted: str,
    decoder: type[Decoder],
    usual: DecodingOptions,
    open_decoder: Callable[[Run, DecodingOptions], Decoder],
    respond: Respond[Decoder],
) -> int:
    """Answers the lines of --input or standard input and returns the exit code.

    Args:
      values: flags of lines, of decoding and of running; --logdir, --precision, --json.
      doing: what the command does, such as "Translating".
      wanted: what a person is to type, such as "a line to translate".
      decoder: what the run's task must decode with.
      usual: how tokens are chosen, where neither flags nor the published model say so.
      open_decoder: returns the decoder of a run.
      respond: writes the answers to a batch of lines.

    Raises:
      UserError: flags are wrong, or the run does not decode so.
    """
    output.check_writable(values, "json")
    skip_bad = skips_bad_lines(values)
    stream = open_input(values)
    logdir = required_logdir(values)
    with LineProgress(doing) as progress, output.open_json_lines(values.json) as records:
        run = load(
            logdir,
            options=runtime_options(values),
            precision=values.precision,
            checkpoint=values.checkpoint,
        )
        run.observer = progress.stages
        run.check_decoder(decoder)
        given = given_options(values, DecodingOptions)
        options = run.published_settings.options(usual, given)
        lines = LineReader(stream)
        opened = open_decoder(run, options)
        progress.rest()
        if stream.isatty():
            warn(f"{run.params.name}, step {run.step:,}. Type {wanted}; Ctrl-D ends.")
        answer = functools.partial(respond, opened, values, records, progress)
        return answer_lines(lines, answer, skip_bad, values.input or STANDARD_INPUT, progress)
