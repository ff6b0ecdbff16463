"""Translates lines: one line on standard input, one line on standard output.

    gshard-translate --logdir=runs/quickstart < lines.txt > translations.txt
    echo "No se pudo guardar el archivo." | gshard-translate --logdir=runs/quickstart
    gshard-translate --logdir=runs/quickstart          and type; Ctrl-D ends

Lines are answered as they come: one typed by hand at once, many waiting in a pipe together, which
is faster. Every line in gives one line out, in order: an empty one for an empty one. A line that is
too long is cut, and a warning on standard error says which.

Exit code: 0 if every line was translated; 1 otherwise.
"""

from __future__ import annotations

import functools
import sys

from absl import flags

from lingvo_gshard.decoding import Translator
from lingvo_gshard.tools.console import startup
from lingvo_gshard.tools.console.line_input import (
    Lines,
    answer,
    define_line_flags,
    skips_bad_lines,
    warn,
    write,
)
from lingvo_gshard.tools.flags import runtime
from lingvo_gshard.tools.runs import trained_run

NAME = "gshard-translate"

# Up to so many lines are a conversation, for which large batches would be mostly empty.
_FEW_LINES = 8
_FEW_LINES_BATCH_TOKENS = 256


def define_flags() -> flags.FlagValues:
    """Returns this program's flags."""
    values = flags.FlagValues()
    flags.DEFINE_string("logdir", None, "Directory that gshard-train wrote.", flag_values=values)
    define_line_flags(values)
    trained_run.define_decoding_flags(values)
    runtime.define_runtime_flags(values, in_cluster=False)
    return values


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    values = define_flags()
    startup.parse_flags(values, argv, __doc__)
    skip_bad = skips_bad_lines(values)
    run = trained_run.Run(values.logdir)
    launch = runtime.Launch(values, run.params)
    lines = Lines(sys.stdin.buffer)
    trained = run.restore(launch, say=warn)
    if sys.stdin.isatty():
        warn(f"{run.params.name}, step {trained.step:,}. Type a line to translate; Ctrl-D ends.")
    translators = _Translators(trained, trained_run.decoding_options(values))
    return answer(lines, functools.partial(_respond, translators), skip_bad)


class _Translators:
    """The model in small batches for few lines, in large ones for many; each made on first use."""

    def __init__(self, trained: trained_run.Trained, options: dict[str, object]):
        self._trained, self._options = trained, options

    def for_lines(self, count: int) -> Translator:
        return self._small if count <= _FEW_LINES else self._large

    @functools.cached_property
    def _small(self) -> Translator:
        return self._trained.translator(batch_tokens=_FEW_LINES_BATCH_TOKENS, **self._options)

    @functools.cached_property
    def _large(self) -> Translator:
        return self._trained.translator(**self._options)


def _respond(translators: _Translators, sentences: list[str], before: int) -> None:
    """Writes the translations of lines that come after so many others."""
    translator = translators.for_lines(len(sentences))
    translations = translator.translate(sentences)
    for index in translations.cut:
        warn(
            f"Warning: line {before + index + 1} is longer than {translator.longest} tokens and "
            "was cut"
        )
    write(translations.texts)
