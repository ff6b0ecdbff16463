"""Runs a command that answers lines with the model of a run, such as gshard-translate."""

from __future__ import annotations

import functools
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, TextIO, TypeVar

from absl import flags

from lingvo_gshard.api.run import Run, load
from lingvo_gshard.core import LONGEST_LINE, UserError, bounded_lines, explained, names
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.console.libraries import harmless, warn
from lingvo_gshard.tools.console.stages import LineProgress
from lingvo_gshard.tools.flags.definitions import Flags, string
from lingvo_gshard.tools.flags.options import given_options
from lingvo_gshard.tools.flags.run import required_logdir, runtime_options
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.text_generator import TextGenerator
from lingvo_gshard.wings.inference.translator import Translator

STANDARD_INPUT = "standard input"
_REFUSE, _SKIP = _BAD_LINE = ("refuse", "skip")

# Largest number of lines answered as one batch, so that answers keep coming.
_BATCH_LINES = 1024


LINE_FLAGS: Flags = dict(
    input="File with the lines. Default: standard input.",
    on_bad_line=string(
        "What happens to a line that is not UTF-8 or has over 16 MiB: refuse (stop with an "
        "error that names it) or skip (warn, and treat it as an empty line).",
        _REFUSE,
        _BAD_LINE,
    ),
)


class _End:
    """Stands behind the last line."""


class LineReader:
    """Reads a stream in a background thread so that waiting lines can be answered as one batch."""

    def __init__(self, stream: BinaryIO):
        self._waiting: queue.Queue[bytes | None | _End] = queue.Queue(maxsize=4 * _BATCH_LINES)
        self._error: OSError | None = None
        threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def batches(self) -> Iterator[list[bytes | None]]:
        """Yields the waiting lines, at least one and at most _BATCH_LINES, until the stream ends.

        A line that is too long is None. After the last line, it raises the OSError of reading.
        """
        ended = False
        while not ended:
            line = self._waiting.get()
            batch: list[bytes | None] = []
            while not isinstance(line, _End):
                batch.append(line)
                if len(batch) == _BATCH_LINES:
                    break
                try:
                    line = self._waiting.get_nowait()
                except queue.Empty:
                    break
            ended = isinstance(line, _End)
            if batch:
                yield batch
        if self._error is not None:
            raise self._error

    def _read(self, stream: BinaryIO) -> None:
        try:
            for line in bounded_lines(stream):
                self._waiting.put(line)
        except OSError as error:
            self._error = error
        self._waiting.put(_End())


def open_input(values: flags.FlagValues) -> BinaryIO:
    """Returns the file of --input, or standard input. Raises UserError if it is not open."""
    if values.input:
        with explained(f"--input={values.input}", OSError):
            return open(values.input, "rb")
    if sys.stdin is None:
        raise UserError(f"{STANDARD_INPUT} is closed; this command reads a line for each answer")
    # Not sys.stdin.buffer: Python aborts if it ends while a thread reads from that.
    return open(sys.stdin.fileno(), "rb", closefd=False)


def answer_lines(
    lines: LineReader,
    respond: Callable[[list[str], int], None],
    skip_bad: bool,
    name: str,
    progress: LineProgress,
) -> int:
    """Answers lines as they arrive and returns the exit code.

    Args:
      respond: writes the answers to a batch of lines. Its second argument is the number of lines
        before the batch.
      skip_bad: whether to warn about a line that is not UTF-8 and treat it as empty.
      name: what the lines come from, for errors.

    Raises:
      UserError: a line is not UTF-8 and `skip_bad` is False. All lines before it are answered.
    """
    answered = 0
    try:
        for batch in lines.batches():
            texts, error = _decode(batch, answered, skip_bad, name)
            progress.begin_batch(answered)
            respond(texts, answered)
            if error:
                raise error
            answered += len(batch)
    except BrokenPipeError:
        # The reader of the answers is gone; keep Python from flushing them at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 1
    return 0


def write_lines(lines: Iterable[str]) -> None:
    """Writes lines to standard output and flushes it."""
    write("".join(f"{line}\n" for line in lines))


def write(text: str) -> None:
    """Writes a text to standard output and flushes it. A terminal gets no control characters."""
    if sys.stdout.isatty():
        text = harmless(text)
    sys.stdout.buffer.write(text.encode("utf-8"))
    sys.stdout.buffer.flush()


def _decode(
    batch: Sequence[bytes | None], answered: int, skip_bad: bool, name: str
) -> tuple[list[str], UserError | None]:
    """Returns texts, and the error of the first line that is not UTF-8 or too long.

    `answered` is the number of lines before them. With `skip_bad`, such lines are empty texts.
    """
    texts: list[str] = []
    for number, line in enumerate(batch, start=answered + 1):
        try:
            if line is not None:
                text = line.decode("utf-8")
                texts.append(text.removeprefix("\ufeff") if number == 1 else text)
                continue
            bad = f"line {number} has more than {LONGEST_LINE:,} bytes"
        except UnicodeDecodeError as error:
            bad = f"line {number} is not UTF-8 (byte {error.start + 1})"
        if not skip_bad:
            return texts, UserError(f"{name}: {bad}; --on_bad_line=skip leaves such lines empty")
        warn(f"Warning: {bad}: left empty")
        texts.append("")
    return texts, None


Decoder = TypeVar("Decoder", Translator, TextGenerator)
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

    Raises:
      UserError: flags are wrong, or the run does not decode so.
    """
    output.check_writable(values, "json")
    names.check(values.on_bad_line, _BAD_LINE, f"--on_bad_line={values.on_bad_line} is unknown")
    stream = open_input(values)
    logdir = required_logdir(values)
    with LineProgress(doing) as progress, output.open_json_lines(values.json) as records:
        run = load(
            logdir,
            options=runtime_options(values),
            precision=values.precision,
            checkpoint=values.checkpoint,
        )
        run.progress = progress.stages
        run.check_decoder(decoder)
        given = given_options(values, DecodingOptions)
        options = run.published_settings.options(usual, given)
        lines = LineReader(stream)
        opened = open_decoder(run, options)
        progress.rest()
        if stream.isatty():
            warn(f"{run.params.name}, step {run.step:,}. Type {wanted}; Ctrl-D ends.")
        answer = functools.partial(respond, opened, values, records, progress)
        skip_bad = values.on_bad_line == _SKIP
        return answer_lines(lines, answer, skip_bad, values.input or STANDARD_INPUT, progress)
