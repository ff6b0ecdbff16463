"""Translates lines: each line of standard input gives one line of standard output.

    gshard-translate --logdir=runs/quickstart < lines.txt > translations.txt
    echo "No se pudo guardar el archivo." | gshard-translate --logdir=runs/quickstart
    gshard-translate --logdir=runs/quickstart          and type lines; Ctrl-D ends

Lines are answered as they arrive: a typed line at once, waiting lines of a pipe in batches, which
is faster. The output has the order of the input, and an empty line for an empty line. A line that
is too long is cut, with a warning on standard error.

Exit code: 0 if every line was translated, else 1.
"""

from __future__ import annotations

import functools
import sys

from absl import flags

from lingvo_gshard.api.options import DecodingOptions
from lingvo_gshard.api.run import Run, load
from lingvo_gshard.decoding import Translator
from lingvo_gshard.tools.console import startup
from lingvo_gshard.tools.console.line_input import (
    LineReader,
    answer_lines,
    define_line_flags,
    skips_bad_lines,
    standard_input,
    warn,
    write_lines,
)
from lingvo_gshard.tools.flags.decoding import decoding_options, define_decoding_flags
from lingvo_gshard.tools.flags.run import define_logdir_flag, required_logdir
from lingvo_gshard.tools.flags.runtime import define_runtime_flags, runtime_options

NAME = "gshard-translate"

# Up to this many lines are a conversation, for which large batches would be mostly padding.
_FEW_LINES = 8
_FEW_LINES_BATCH_TOKENS = 256


def define_flags() -> flags.FlagValues:
    """Returns this command's flags."""
    values = flags.FlagValues()
    define_logdir_flag(values)
    define_line_flags(values)
    define_decoding_flags(values)
    define_runtime_flags(values, in_cluster=False)
    return values


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    values = define_flags()
    startup.parse_flags(values, argv, __doc__)
    skip_bad = skips_bad_lines(values)
    stream = standard_input()
    run = load(required_logdir(values), options=runtime_options(values))
    run.check_decoder(Translator)
    lines = LineReader(stream)
    translators = _Translators(run, decoding_options(values))
    if sys.stdin.isatty():
        step = run.model.step
        warn(f"{run.params.name}, step {step:,}. Type a line to translate; Ctrl-D ends.")
    return answer_lines(lines, functools.partial(_respond, translators), skip_bad)


class _Translators:
    """A translator in small batches for few lines, and one in large batches for many."""

    def __init__(self, run: Run, options: DecodingOptions):
        self._run, self._options = run, options

    def for_lines(self, count: int) -> Translator:
        return self._small if count <= _FEW_LINES else self._large

    @functools.cached_property
    def _small(self) -> Translator:
        return self._run.translator(self._options, batch_tokens=_FEW_LINES_BATCH_TOKENS)

    @functools.cached_property
    def _large(self) -> Translator:
        return self._run.translator(self._options)


def _respond(translators: _Translators, sentences: list[str], before: int) -> None:
    """Translates a batch of input lines and writes the translations.

    Args:
      translators: compiled for batches of few and of many lines.
      sentences: the lines.
      before: number of input lines before the batch, for warnings.
    """
    translator = translators.for_lines(len(sentences))
    translations = translator.translate(sentences)
    for index in translations.cut:
        warn(
            f"Warning: line {before + index + 1} is longer than {translator.longest} tokens and "
            "was cut"
        )
    write_lines(translations.texts)
