"""Lines of standard input, answered as they come."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO

from absl import flags

from lingvo_gshard.core.config import names

_REFUSE, _SKIP = _BAD_LINE = ("refuse", "skip")

# So many lines at most are taken together, so that answers keep coming.
_MOST_LINES = 1024


def define_line_flags(values: flags.FlagValues) -> None:
    """Adds the flag that says what to do with lines that are no text."""
    flags.DEFINE_string(
        "on_bad_line",
        _REFUSE,
        "What to do with a line that is not UTF-8: refuse (stop with an error that says which) or "
        "skip (warn, and take it for an empty line).",
        flag_values=values,
    )


def skips_bad_lines(values: flags.FlagValues) -> bool:
    """Returns whether --on_bad_line says so; ValueError if it says neither."""
    if values.on_bad_line not in _BAD_LINE:
        hint = names.nearest(values.on_bad_line, _BAD_LINE)
        raise ValueError(f"--on_bad_line={values.on_bad_line} is unknown. {hint}")
    return values.on_bad_line == _SKIP


class Lines:
    """Lines of a stream, read by a thread, so that those that wait can be taken together."""

    def __init__(self, stream: BinaryIO):
        self._waiting: queue.Queue[bytes | None] = queue.Queue(maxsize=4 * _MOST_LINES)
        self._error: OSError | None = None
        threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def chunks(self) -> Iterator[list[bytes]]:
        """Yields the lines that wait, at least one and at most _MOST_LINES, until the stream ends.

        Raises OSError if the stream cannot be read.
        """
        ended = False
        while not ended:
            chunk = [self._waiting.get()]
            while chunk[-1] is not None and len(chunk) < _MOST_LINES:
                try:
                    chunk.append(self._waiting.get_nowait())
                except queue.Empty:
                    break
            ended = chunk[-1] is None
            if ended:
                chunk.pop()
            if chunk:
                yield chunk
        if self._error is not None:
            raise self._error

    def _read(self, stream: BinaryIO) -> None:
        try:
            for line in stream:
                self._waiting.put(line)
        except OSError as error:
            self._error = error
        self._waiting.put(None)


def answer(lines: Lines, respond: Callable[[list[str], int], None], skip_bad: bool) -> int:
    """Has lines answered as they come; returns the exit code.

    respond: writes the answers to some texts; the number is how many lines there were before.
    Raises ValueError with the line's number for one that is not UTF-8, when all before it are
    answered, unless `skip_bad`.
    """
    before = 0
    try:
        for chunk in lines.chunks():
            texts, error = _decoded(chunk, before, skip_bad)
            respond(texts, before)
            if error:
                raise error
            before += len(chunk)
    except BrokenPipeError:
        # Whoever read the answers has gone; Python must not try to flush them at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 1
    return 0


def write(rows: Iterable[str]) -> None:
    """Writes lines to standard output at once."""
    sys.stdout.buffer.write("".join(f"{row}\n" for row in rows).encode("utf-8"))
    sys.stdout.buffer.flush()


def _decoded(
    chunk: Sequence[bytes], before: int, skip_bad: bool
) -> tuple[list[str], ValueError | None]:
    """Returns the texts of lines, and the error of the first that is not UTF-8, where they end.

    before: how many lines there were before. With `skip_bad` there is a warning instead, and an
    empty text.
    """
    texts: list[str] = []
    for number, line in enumerate(chunk, start=before + 1):
        try:
            text = line.decode("utf-8")
            texts.append(text.removeprefix("\ufeff") if number == 1 else text)
        except UnicodeDecodeError as error:
            bad = f"line {number} is not UTF-8 (byte {error.start + 1})"
            if not skip_bad:
                return texts, ValueError(
                    f"standard input: {bad}; --on_bad_line=skip leaves such lines empty"
                )
            warn(f"Warning: {bad}: left empty")
            texts.append("")
    return texts, None


def warn(text: str) -> None:
    """Writes a line to standard error at once."""
    print(text, file=sys.stderr, flush=True)
