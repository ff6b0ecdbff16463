"""Executables: the compiled programs of one model on its devices."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from lingvo_gshard.core import SILENT, Device, Progress
from lingvo_gshard.runtime import Array, Program, can_be_kept, without_cache
from lingvo_gshard.wings.inference.decoding.state import SearchKind, StateShape

PREPARE, ADMIT, STEPS, GATES, SCORES = "prepare", "admit", "steps", "gates", "scores"


@dataclasses.dataclass(frozen=True)
class ProgramKey:
    """One program of a decoder.

    Attributes:
      name: PREPARE makes weights for decoding from the trained weights. ADMIT lets texts into
        rows, STEPS adds tokens, GATES tells the experts that tokens of complete texts use, and
        SCORES tells how likely the tokens of complete texts are.
      kind: how tokens are chosen; None for PREPARE.
      shape: the state before the call, or the sizes of the texts of GATES and SCORES; None for
        PREPARE.
      texts: for ADMIT, the number of texts that enter together.
      given: for ADMIT, the number of positions for given tokens; 0 if no text has any.
      source: for ADMIT, the number of positions for the tokens of a source; 0 without sources.
    """

    name: str
    kind: SearchKind | None = None
    shape: StateShape | None = None
    texts: int = 0
    given: int = 0
    source: int = 0

    def __str__(self) -> str:
        """Returns a name that is valid for a file and that only equal keys have."""
        parts = [self.name]
        if self.kind:
            flags = [n for n in _FLAGS if getattr(self.kind, n)]
            parts += [f"beam{self.kind.beam}", *flags]
        if self.shape:
            parts.append(f"{self.shape.rows}x{self.shape.length}x{self.shape.memory_length}")
        if self.name == ADMIT:
            parts += [f"texts{self.texts}", f"given{self.given}", f"source{self.source}"]
        return "-".join(parts)


_FLAGS = tuple(f.name for f in dataclasses.fields(SearchKind) if f.name != "beam")


@dataclasses.dataclass(frozen=True)
class DecodingExecutable:
    """A compiled program of a decoder, made here or read from a file.

    `call`, a jax.stages.Compiled, takes one array for each input, and returns the outputs. Donated
    inputs are gone.
    """

    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    call: Any

    def inputs_of(self, prefix: str) -> list[Array]:
        """Returns the inputs whose paths start with `prefix` and a dot."""
        return [array for array in self.inputs if array.path.startswith(f"{prefix}.")]


# A program that nobody has asked for again within this time is not compiled any more.
_FORGET_SECONDS = 10.0
# A program that could not be made is not tried again for this many seconds.
_RETRY_SECONDS = 5.0


class Background:
    """Makes programs one after the other, on a few threads of its own."""

    def __init__(self, make: Callable[[ProgramKey], object], threads: int, name: str):
        """Starts no thread before the first program is wanted."""
        self._make, self._most, self._name = make, threads, name
        self._changed = threading.Condition()
        # The time of the last call of `want` for each waiting program, and the time when the making
        # of each program under way began.
        self._wanted: dict[ProgramKey, float] = {}
        self._under_way: dict[ProgramKey, float] = {}
        self._failures: dict[ProgramKey, tuple[float, BaseException]] = {}
        self._threads: list[threading.Thread] = []
        self._is_stopped = False

    def want(self, key: ProgramKey, on_end: Callable[[], None]) -> None:
        """Has a program made. Callers repeat the call for as long as they want the program.

        `on_end` is called on the thread that has made some program, or failed to.
        """
        with self._changed:
            if key in self._under_way:
                return
            failed = self._failures.get(key)
            if failed and time.monotonic() - failed[0] < _RETRY_SECONDS:
                return
            self._failures.pop(key, None)
            self._wanted[key] = time.monotonic()
            if len(self._threads) < min(self._most, len(self._wanted) + len(self._under_way)):
                thread = threading.Thread(
                    target=self._run, args=(on_end,), name=self._name, daemon=True
                )
                self._threads.append(thread)
                thread.start()
            self._changed.notify()

    def failure(self, key: ProgramKey) -> tuple[float, BaseException] | None:
        """Returns time.monotonic() and the error of a program's last failure; None without one."""
        return self._failures.get(key)

    def busy(self) -> dict[ProgramKey, float]:
        """Returns since when programs are being made, in the time of time.monotonic."""
        with self._changed:
            return dict(self._under_way)

    def stop(self) -> None:
        """Waits for the programs under way, and ends the threads until another one is wanted."""
        with self._changed:
            self._is_stopped = True
            self._wanted.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        with self._changed:
            self._threads, self._is_stopped = [], False

    def _run(self, on_end: Callable[[], None]) -> None:
        while key := self._next():
            try:
                self._make(key)
            except BaseException as error:  # Callers who need the program get the error.
                self._failures[key] = time.monotonic(), error
            with self._changed:
                del self._under_way[key]
            on_end()

    def _next(self) -> ProgramKey | None:
        """Returns a program to make, when there is one; None if there will be none."""
        with self._changed:
            while not self._is_stopped:
                for key in list(self._wanted):
                    if time.monotonic() - self._wanted.pop(key) < _FORGET_SECONDS:
                        self._under_way[key] = time.monotonic()
                        return key
                self._changed.wait()
        return None


# Returns the program of a key: lowers it, or reads it from a file.
ProgramSource = Callable[[ProgramKey], Program]


class ProgramStore(Protocol):
    """Keeps compiled programs for later processes."""

    def program_names(self) -> frozenset[str]:
        """Returns the keys of all programs that it has, as texts."""
        ...

    def read_program(self, key: ProgramKey, devices: Sequence[Device]) -> DecodingExecutable | None:
        """Returns a compiled program, loaded to devices; None if there is none."""
        ...

    def write_program(self, key: ProgramKey, compiled: DecodingExecutable) -> None:
        """Keeps a compiled program."""
        ...


class CompilerStuckError(RuntimeError):
    """The compiler did not come to an end with a program."""


class Compiler(Protocol):
    """Has programs compiled by another process."""

    def __call__(self, key: ProgramKey) -> None:
        """Waits until the store has a program.

        If the other process fails, this returns: compiling in this one tells why.

        Raises:
          CompilerStuckError: the other process takes too long.
        """
        ...

    def stop(self) -> None:
        """Ends the process at once, also while it compiles."""
        ...


class Executables:
    """Compiles programs when they are first needed. Threads may share it."""

    def __init__(
        self,
        source: ProgramSource,
        devices: Sequence[Device],
        store: ProgramStore | None = None,
        parts: int = 1,
        progress: Progress = SILENT,
        elsewhere: Compiler | None = None,
    ):
        """Prepares to compile.

        Args:
          devices: the devices of the programs' mesh, in its order.
          store: keeps compiled programs; None compiles all of them.
          parts: parts of a batch that devices decode side by side; see `maker.row_parts`.
          elsewhere: has a program compiled into the store by another process, and waits for it;
            None compiles in this one.
        """
        self.parts, self._elsewhere = parts, elsewhere
        self._source, self.devices = source, list(devices)
        self._store = store if can_be_kept(self.devices) else None
        self._progress = progress
        self._lock = threading.Lock()
        self._lowering = threading.Lock()
        self._compiled: dict[ProgramKey, DecodingExecutable] = {}
        self._under_way: dict[ProgramKey, threading.Lock] = {}
        self._stored = set(self._store.program_names()) if self._store else set()
        self.seconds = 0.0
        # Loading takes a tenth of a second, and does not wait for compiling, which takes seconds.
        self._loading = Background(self.get, 2, "loader")
        self._compiling = Background(self.get, 1 if elsewhere else 2, "compiler")
        self._listeners: list[Callable[[], None]] = []

    @property
    def count(self) -> int:
        """The number of programs compiled so far."""
        return len(self._compiled)

    @property
    def is_on_one_cpu(self) -> bool:
        """Whether the only device is a CPU."""
        return [device.platform for device in self.devices] == ["cpu"]

    def is_loaded(self, key: ProgramKey) -> bool:
        """Returns whether a program can be called at once."""
        return key in self._compiled

    def is_ready(self, key: ProgramKey) -> bool:
        """Returns whether a program need not be compiled."""
        return key in self._compiled or str(key) in self._stored

    def knows(self, kind: SearchKind) -> bool:
        """Returns whether a kind of search has been compiled before, in some shape."""
        if any(key.name == STEPS and key.kind == kind for key in list(self._compiled)):
            return True
        named = re.compile(re.escape(str(ProgramKey(STEPS, kind))) + r"-\d")
        return any(named.match(name) for name in list(self._stored))

    def want(self, keys: Iterable[ProgramKey]) -> None:
        """Has programs made in the background. To be called again while they are wanted."""
        for key in keys:
            if key not in self._compiled:
                makers = self._loading if self.is_ready(key) else self._compiling
                makers.want(key, self._notify)

    def listen(self, listener: Callable[[], None]) -> None:
        """Has a function called after each program that was made in the background, or failed."""
        self._listeners.append(listener)

    def failure(self, keys: Iterable[ProgramKey], since: float) -> BaseException | None:
        """Returns the error of a program that failed after a time.monotonic(); None if none did."""
        for key in keys:
            for makers in (self._loading, self._compiling):
                found = makers.failure(key)
                if found and found[0] >= since and key not in self._compiled:
                    return found[1]
        return None

    def making(self) -> dict[ProgramKey, float]:
        """Returns since when programs are being made, in the time of time.monotonic."""
        return self._loading.busy() | self._compiling.busy()

    def forget(self, kind: SearchKind) -> None:
        """Frees the programs for a kind of search after calls under way; they are loaded again."""
        for key in [key for key in list(self._compiled) if key.kind == kind]:
            del self._compiled[key]
        self._notify()

    def stop(self) -> None:
        """Ends the threads that make programs. The next wanted program starts new threads."""
        if self._elsewhere:
            self._elsewhere.stop()
        for makers in (self._loading, self._compiling):
            makers.stop()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    def program(self, key: ProgramKey) -> Program:
        """Traces and lowers a program, without compiling it."""
        with self._lowering:
            return self._source(key)

    def get(self, key: ProgramKey) -> DecodingExecutable:
        """Returns a program, compiled now if it was not needed before."""
        found = self._compiled.get(key)
        if found:
            return found
        with self._lock:
            lock = self._under_way.setdefault(key, threading.Lock())
        with lock:
            found = self._compiled.get(key)
            if not found:
                started = time.monotonic()
                found = self._compiled[key] = self._compile(key)
                self.seconds += time.monotonic() - started
                if self._store:
                    self._stored.add(str(key))
        return found

    def _stored_program(self, key: ProgramKey) -> DecodingExecutable | None:
        """Returns a program from the store; None if it is not there.

        If another process compiles, this waits until that has put the program there.
        """
        if not self._store:
            return None
        stored = self._store.read_program(key, self.devices)
        if stored or not self._elsewhere:
            return stored
        with self._progress.within(f"Compiling {key}"):
            self._elsewhere(key)
        return self._store.read_program(key, self.devices)

    def _compile(self, key: ProgramKey) -> DecodingExecutable:
        stored = self._stored_program(key)
        if stored:
            return stored
        with self._progress.within(f"Compiling {key}"):
            # TensorFlow traces, and jax switches to 64 bits, for one thread at a time.
            with self._lowering:
                program = self._source(key)
                lowered = program.lower(self.devices)
            is_cached = not self._store and can_be_kept(self.devices)
            with contextlib.nullcontext() if is_cached else without_cache():
                compiled = DecodingExecutable(program.inputs, program.outputs, lowered.compile())
        if self._store:
            self._store.write_program(key, compiled)
        return compiled
