"""CompilerProcess: compiles decoding programs in a process of its own.

Lowering a program takes TensorFlow, and compiling it takes hundreds of megabytes. A server that
has both done elsewhere reads the finished programs from the start-up cache, and never imports
TensorFlow. The process ends when it has had nothing to do for a while, or when its parent has gone.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import pickle
import select
import subprocess
import threading
from collections.abc import Callable
from typing import IO, Any

from lingvo_gshard.api.options import RuntimeOptions
from lingvo_gshard.wings.cluster.child_process import start_module
from lingvo_gshard.wings.inference.programs.executables import CompilerStuckError, ProgramKey

_log = logging.getLogger(__name__)

# The process ends after this many seconds without work.
_IDLE_SECONDS = 20.0
# If a process is stuck at a program, another process is asked; at most this many processes.
_TRIES = 2
_MODULE = "lingvo_gshard.api.decoding.compiler_main"


class CompilerProcess:
    """Has programs of one run compiled into the start-up cache. Threads may share it."""

    def __init__(
        self,
        logdir: str,
        options: RuntimeOptions,
        precision: str,
        checkpoint: str | int,
        most_seconds: float,
        is_serving: Callable[[], bool] = lambda: False,
    ):
        """Starts nothing before the first program is needed.

        Args:
          precision: how the run's weights are stored and multiplied.
          checkpoint: which of the run's checkpoints is read.
          most_seconds: a process that takes longer to compile a program counts as stuck and is
            killed.
          is_serving: whether others are served now, so that the process gives way to them.
        """
        self._is_serving = is_serving
        self._most_seconds = most_seconds
        self._run = (logdir, options, precision, checkpoint)
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._timer: threading.Timer | None = None
        self._is_stopped = False

    def __call__(self, key: ProgramKey | None = None) -> None:
        """Waits until the cache has a program; without a key, until it has the model.

        A failure is not reported here. The caller then compiles the program itself, and sees the
        error. If a process is stuck, a second process is started and asked.

        Raises:
          CompilerStuckError: the second process is stuck, too.
          RuntimeError: `stop` was called.
        """
        with self._lock:
            if self._timer:
                self._timer.cancel()
            for _ in range(_TRIES):
                if self._is_stopped:
                    raise RuntimeError("the compiler was stopped")
                if self._ask(key):
                    break
            else:
                raise CompilerStuckError(
                    f"compiling {key or 'the model'} took longer than {self._most_seconds:g} s"
                )
            self._timer = threading.Timer(_IDLE_SECONDS, self.close)
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> None:
        """Ends the process at once, also while it compiles. No other one is started."""
        self._is_stopped = True
        process = self._process
        if process:
            process.kill()

    def _ask(self, key: ProgramKey | None) -> bool:
        """Returns whether the process answered or ended, and was not stuck."""
        try:
            requests, answers = self._started()
            _write(requests, (key, self._is_serving()))
            if not _has_input(answers, self._most_seconds):
                _log.warning(
                    f"The compiler was stuck for {self._most_seconds:g} s at "
                    f"{key or 'the model'}, and is started anew"
                )
                self._end(kills=True)
                return False
            answers.readline()
        except OSError:  # It has ended.
            self._end()
        if self._is_stopped:
            raise RuntimeError("the compiler was stopped")
        return True

    def close(self) -> None:
        """Ends the process, if there is one and no program is under way."""
        with self._lock:
            self._end()

    def _started(self) -> tuple[IO[bytes], IO[bytes]]:
        """Starts the process if there is none. Returns the streams to and from it."""
        if self._process is None or self._process.poll() is not None:
            self._process = start_module(_MODULE, stderr=subprocess.DEVNULL)
            _write(_streams(self._process)[0], self._run)
        return _streams(self._process)

    def _end(self, kills: bool = False) -> None:
        process, self._process = self._process, None
        if process:
            if kills:
                process.kill()
            for stream in _streams(process):
                with contextlib.suppress(OSError):
                    stream.close()
            process.wait()


def _streams(process: subprocess.Popen) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin and process.stdout
    return process.stdin, process.stdout


def _has_input(stream: IO[bytes], seconds: float) -> bool:
    """Waits until a stream can be read or has ended. Returns whether that came in time."""
    # select.select would fail in a server with more than 1,023 open files.
    ready = select.poll()
    ready.register(stream, select.POLLIN)
    return bool(ready.poll(seconds * 1000))


def _write(stream: IO[bytes], value: object) -> None:
    stream.write(base64.b64encode(pickle.dumps(value)) + b"\n")
    stream.flush()


def read_value(line: bytes) -> Any:
    """Returns the value of a line that `CompilerProcess` wrote."""
    return pickle.loads(base64.b64decode(line))
