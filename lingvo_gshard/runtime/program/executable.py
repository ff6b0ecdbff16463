"""Executable: a Program compiled for devices, with the compiler's report on it.

jax caches the programs. The compiler prints nothing for a cached program, so a second run would not
show the compiler's warnings. The output of the compiler is therefore stored next to the programs.

On CPU, a program that jax read from its cache cannot be serialized again. The serialized program
has no functions, and fails when it is loaded and called (jax 0.10.2). Code that serializes programs
therefore compiles `without_cache`.

A program for several CPUs is neither cached nor kept: read from a file, it has lost the order of
its collectives. Devices that begin with different ones wait for each other for ever (jax 0.10.2).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from lingvo_gshard.core import Device, Seam, UserError, explained, jax, objects
from lingvo_gshard.runtime import compile_options, standard_error
from lingvo_gshard.runtime.program.program import Program, memory_bytes, using_partitioner

_LEAST_SECONDS = 1.0
# jax's name of the event that it reads a program from its cache.
_HIT = "/jax/compilation_cache/cache_hits"

_lock = threading.Lock()
# Directories of jax's cache, one for each thread that compiles without it, the first one first.
_set_aside: list[str | None] = []


def keep_in(directory: str | os.PathLike) -> None:
    """Caches programs that take a second or more to compile in a directory.

    Raises:
      UserError: names `compilation_cache` if the directory cannot be created.
    """
    with explained(f"`compilation_cache={directory}`", OSError):
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)


def can_be_kept(devices: Sequence[Device]) -> bool:
    """Returns whether compiled programs for these devices can be read from files and run."""
    return len(devices) == 1 or devices[0].platform != "cpu"


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Turns jax's cache of compiled programs off inside a `with` block, for all threads."""
    with _lock:
        _set_aside.append(jax.config.values["jax_compilation_cache_dir"])
        if len(_set_aside) == 1:
            _use(None)
    try:
        yield
    finally:
        with _lock:
            directory = _set_aside[0]
            _set_aside.pop()
            if not _set_aside:
                _use(directory)


def _use(directory: str | None) -> None:
    if directory == jax.config.values["jax_compilation_cache_dir"]:
        return
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_compilation_cache_dir", directory)
    # jax decides once whether it uses a cache.
    compilation_cache.reset_cache()


@contextlib.contextmanager
def watching_cache() -> Iterator[list[str]]:
    """Lists this thread's hits in jax's cache of compiled programs inside a `with` block."""
    hits: list[str] = []
    thread = threading.get_ident()

    def on_event(event: str, **_: str | int) -> None:
        if event == _HIT and threading.get_ident() == thread:
            hits.append(event)

    jax.monitoring.register_event_listener(on_event)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(on_event)


def with_earlier_output(digest: str, output: str) -> str:
    """Returns the compiler's output for a program, from the cache if `output` is empty.

    Args:
      digest: digest of the program and its compilation options.
      output: the output of this compilation; stored in the cache unless empty.
    """
    if not jax.config.values["jax_compilation_cache_dir"]:
        return output
    file = pathlib.Path(jax.config.values["jax_compilation_cache_dir"]) / f"said-of-{digest}.txt"
    try:
        if output:
            unfinished = file.with_suffix(f".{os.getpid()}")
            unfinished.write_text(output, encoding="utf-8")
            os.replace(unfinished, file)
            return output
        return objects.read_text(file)
    except OSError:
        return output


# Compiler output to hide: the notice that GSPMD is deprecated, and what `full_replications` lists.
_HIDDEN = (
    "GSPMD sharding propagation is going to be deprecated",
    "Involuntary full rematerialization",
)
# jax's names of the values of TF_CPP_MIN_LOG_LEVEL.
_LEVELS = ("INFO", "WARNING", "ERROR", "CRITICAL")


class ProgramReader(Protocol):
    """Reads compiled programs. It defines the types of what it returns."""

    def module(self, compiled: jax.stages.Compiled) -> Any:
        """Returns the program of one device as data."""
        ...

    def proto(self, compiled: jax.stages.Compiled) -> bytes:
        """Returns the program of one device as a serialized HloModuleProto."""
        ...

    def operations(self, executable: Executable, layers: Iterable[str] | None) -> Any:
        """Returns the operations that one device executes."""
        ...

    def collectives(self, executable: Executable, layers: Iterable[str] | None) -> list[Any]:
        """Returns the collectives in the program of one device."""
        ...

    def collectives_in_words(self, executable: Executable) -> str:
        """Returns the numbers of collectives by kind."""
        ...

    def full_replications(self, executable: Executable) -> list[Any]:
        """Returns the tensors that the partitioner could only reshard by replicating them."""
        ...


PROGRAM_READERS: Seam[ProgramReader] = Seam("program_readers")


def _reader() -> ProgramReader:
    return next(iter(PROGRAM_READERS))


class Executable:
    """A compiled program, called with flat jax.Arrays.

    Args:
      devices: the devices of the program's mesh, in its order.
      options: options of XLA's compiler by name, such as "xla_gpu_autotune_level".
      is_called: False if the program is only read, so that it can be cached for all devices.

    Attributes:
      options: the options that it was compiled with.
      compiler_output: what the compiler wrote to standard error.
      lowering_seconds: seconds to lower StableHLO for the devices.
      compiling_seconds: seconds to compile the program with XLA, or to read it from the cache.
      is_cached: whether jax read the compiled program from its cache on disk.

    Raises:
      UserError: if the number of devices is not the size of the program's mesh, or the compiler
        refuses an option; when called, if an argument's memory was donated to an earlier call.
    """

    def __init__(
        self,
        program: Program,
        devices: Sequence[Device],
        options: Mapping[str, Any] | None = None,
        is_called: bool = True,
    ):
        self.program = program
        started = time.monotonic()
        lowered = program.lower(devices)
        self.lowering_seconds = time.monotonic() - started
        is_cached = not is_called or can_be_kept(devices)
        cache = contextlib.nullcontext() if is_cached else without_cache()
        with cache, watching_cache() as hits:
            self._compiled, output, self.options = _compile(
                lowered, program.partitioner, dict(options or {})
            )
        self.compiling_seconds = time.monotonic() - started - self.lowering_seconds
        self.is_cached = bool(hits)
        self.compiler_output = with_earlier_output(_digest(program, self.options), output)

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        for spec, array in zip(self.program.inputs, arrays, strict=True):
            # jax would end the process.
            if isinstance(array, jax.Array) and array.is_deleted():
                raise UserError(
                    f"{self.program.name}: the memory of {spec.path} was donated to an earlier "
                    "call; use the new value that the call returned"
                )
        return self._compiled(*arrays)

    @property
    def input_shardings(self) -> tuple[jax.sharding.Sharding, ...]:
        """The sharding of each input."""
        return tuple(self._compiled.input_shardings[0])

    @property
    def output_shardings(self) -> tuple[jax.sharding.Sharding, ...]:
        """The sharding of each output, also where the partitioner chose it."""
        return tuple(self._compiled.output_shardings)

    def hlo_text(self) -> str:
        """Returns the compiled program of one device as text, to read it."""
        return self._compiled.as_text() or ""

    def hlo_module(self) -> Any:
        """Returns the compiled program of one device as an `hlo.Module`."""
        return _reader().module(self._compiled)

    def hlo_proto(self) -> bytes:
        """Returns the compiled program of one device as a serialized HloModuleProto."""
        return _reader().proto(self._compiled)

    def operations(self, layers: Iterable[str] | None = None) -> Any:
        """Returns the operations that one device executes, as `hlo.read_operations` does."""
        return _reader().operations(self, layers)

    def collectives(self, layers: Iterable[str] | None = None) -> list[Any]:
        """Returns the collectives in the program of one device, as `hlo.CollectiveCall`s.

        A collective in a loop is listed once; `times` says how often a step executes it.

        Args:
          layers: name scopes of all layers; see `hlo.read_operations`.
        """
        return _reader().collectives(self, layers)

    def memory(self) -> dict[str, int]:
        """Returns the bytes per device: arguments, outputs, temporaries, code and peak."""
        return memory_bytes(self._compiled)

    def full_replications(self) -> list[Any]:
        """Returns the tensors that the partitioner could only reshard by replicating them.

        They are `hlo.FullReplication`s.
        """
        return [each for reader in PROGRAM_READERS for each in reader.full_replications(self)]


def _digest(program: Program, options: Mapping[str, Any]) -> str:
    text = json.dumps(dict(options), sort_keys=True, default=str)
    return (
        hashlib.sha256(f"{program.digest}{text}".encode()).hexdigest()
        if options
        else program.digest
    )


def _compile(
    lowered: jax.stages.Lowered, partitioner: str, options: dict[str, Any]
) -> tuple[jax.stages.Compiled, str, dict[str, Any]]:
    """Compiles a program, with fewer options where those given are known to fail.

    Returns:
      The program, the compiler's output to standard error, and the options.
    """
    # A TF_CPP_MIN_LOG_LEVEL that hides warnings would lose the partitioner's.
    logged = jax.config.values["jax_logging_level"]
    jax.config.update("jax_logging_level", "WARNING")
    try:
        with standard_error.capture(_HIDDEN) as output, using_partitioner(partitioner):
            compiled = lowered.compile(options or None)
    except jax.errors.JaxRuntimeError as error:
        compile_options.check_refusal(str(error), options)
        fewer = compile_options.after_failure(str(error), options)
        if fewer is None:
            raise
        return _compile(lowered, partitioner, fewer)
    finally:
        # If no level was set before, jax would keep the level of its libraries in C++.
        level = int(os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1"))
        jax.config.update("jax_logging_level", _LEVELS[min(level, len(_LEVELS) - 1)])
        jax.config.update("jax_logging_level", logged)
    return compiled, output.text, options
