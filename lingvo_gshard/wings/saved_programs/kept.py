"""Kept programs: lowered steps beside a run, which a process that resumes it need not trace again.

Tracing and lowering a step take longer than reading its compiled program from jax's cache. A
program is used again only if nothing that it may depend on has changed: Params, shapes, the mesh,
the devices, options of the compilers, installed packages, and all source files outside of them that
were loaded when it was traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import platform
import sys
import sysconfig
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import msgspec

from lingvo_gshard.core import objects, processes
from lingvo_gshard.core.lazy import Device
from lingvo_gshard.runtime import Program, SpmdOptions, SpmdRuntime, StepCompiler, traits_of
from lingvo_gshard.sharding import Partitioning

_PACKAGE = pathlib.Path(__file__).resolve().parents[2]
_SUFFIX, _VERSION = ".program", "*.dist-info"
# Variables with these beginnings may change what TensorFlow, jax and XLA lower or compile.
_VARIABLES = ("JAX_", "LIBTPU_", "TF_", "TPU_", "XLA_")
# These differ from process to process, and change no program.
_OF_PROCESS = ("COORDINATOR", "PROCESS", "WORKER", "LOG_LEVEL")


class KeptProgram(msgspec.Struct, frozen=True):
    """The content of a file.

    Attributes:
      sources: path of a source file -> digest, of those outside of installed packages.
      program: the lowered step.
      metric_names: as `StepCompiler` has them.
    """

    sources: dict[str, str]
    program: Program
    metric_names: list[str]


class ProgramKeeper:
    """The programs in the folder of one run."""

    def __init__(self, folder: str | os.PathLike, facts: Mapping[str, str]):
        """Names the folder, on a disk or in a bucket, and the facts that all programs depend on."""
        self._folder = os.fspath(folder)
        self._facts = {**facts, **_facts_of_process()}

    def get(
        self, kind: str, key: Hashable, make: Callable[[], tuple[Program, list[str]]]
    ) -> tuple[Program, list[str]]:
        """Returns a kept program, or makes one and keeps it.

        Args:
          kind: such as "train".
          key: what else it depends on. A key with a function that has no fields is never kept.
        """
        text = _text_of(key)
        if text is None:
            return make()
        digest = _digest(msgspec.json.encode([kind, text, self._facts], order="deterministic"))
        path = f"{self._folder}/{kind}-{digest[:32]}{_SUFFIX}"
        kept = self._read(path, digest)
        if kept is not None:
            return kept.program, kept.metric_names
        program, metric_names = make()
        if processes.is_main():
            timeless = dataclasses.replace(program, tracing_seconds=0.0, lowering_seconds=0.0)
            self._write(path, digest, KeptProgram(_loaded_sources(), timeless, metric_names))
        return program, metric_names

    def _read(self, path: str, digest: str) -> KeptProgram | None:
        """Returns the program of a file; None if there is none, or something has changed."""
        try:
            seal, _, content = objects.read_bytes(path).partition(b"\n")
            if seal.decode() != _digest(digest.encode() + content):
                return None
            kept = msgspec.msgpack.decode(content, type=KeptProgram)
        except (OSError, ValueError, msgspec.MsgspecError):
            return None
        is_same = all(_digest_of_file(file) == known for file, known in kept.sources.items())
        return kept if is_same else None

    def _write(self, path: str, digest: str, kept: KeptProgram) -> None:
        """Writes a file. A run whose folder cannot be written goes on without it."""
        content = msgspec.msgpack.encode(kept)
        seal = _digest(digest.encode() + content)
        with contextlib.suppress(OSError):
            objects.make_folder(self._folder)
            objects.write_bytes(path, seal.encode() + b"\n" + content)


class KeepingCompiler(StepCompiler):
    """A `StepCompiler` that asks a keeper for programs."""

    def __init__(self, keeper: ProgramKeeper, *given: Any):
        """Takes the keeper, and the arguments of a `StepCompiler`."""
        super().__init__(*given)
        self._keeper = keeper

    def step(
        self,
        kind: str,
        key: Hashable,
        devices: Sequence[Device],
        make: Callable,
        *given: Any,
        **named: Any,
    ) -> Any:
        """Returns the compiled program of a kind and a key; see `StepCompiler.step`."""
        return super().step(
            kind, key, devices, lambda: self._keeper.get(kind, key, make), *given, **named
        )


class KeepingRuntime(SpmdRuntime):
    """A runtime of a mesh that keeps the programs of a run."""

    def __init__(
        self,
        trainer: Any,
        partitioning: Partitioning,
        devices: Sequence[Device],
        options: SpmdOptions,
        kept: tuple[os.PathLike, str],
    ):
        """Makes an `SpmdRuntime`. `kept` has the folder of programs, and the run's Params."""
        super().__init__(trainer, partitioning, devices, options)
        (folder, params_text), first = kept, self._devices[0]
        items = trainer.state_specs().flatten_items()
        specs = [(path, spec.shape, spec.dtype, spec.layout) for path, spec in items]
        facts = {
            "params": params_text,
            "state": repr(specs),
            "partitioning": repr(self._partitioning),
            "options": repr(options),
            "devices": f"{len(self._devices)} {first.device_kind}",
            "platform": f"{first.platform} {first.client.platform_version}",
        }
        traits = traits_of(trainer, self._partitioning)
        keeper = ProgramKeeper(folder, facts)
        self._compiler = KeepingCompiler(keeper, options.compile_options, traits)


def _facts_of_process() -> dict[str, str]:
    """Returns the packages, the source files of this one, and the variables of this process."""
    variables = sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES) and not any(part in name for part in _OF_PROCESS)
    )
    own = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            own.update(f"{path.relative_to(_PACKAGE)} {_digest_of_file(str(path))}\n".encode())
    # Names of these folders have the versions of packages.
    installed = [path.name for folder in sys.path for path in pathlib.Path(folder).glob(_VERSION)]
    return {
        "python": platform.python_version(),
        "packages": " ".join(sorted(installed)),
        "sources": own.hexdigest(),
        "variables": " ".join(variables),
    }


def _loaded_sources() -> dict[str, str]:
    """Returns the digests of loaded modules that are neither installed nor of this package."""
    known = [
        str(_PACKAGE),
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    ]
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    own = [f for f in files if f and not any(f.startswith(folder + os.sep) for folder in known)]
    return {file: _digest_of_file(file) for file in sorted(own)}


def _text_of(value: Any) -> str | None:
    """Returns a text that is equal for equal keys; None for what may hide something."""
    if value is None or isinstance(value, str | int | float | bool):
        return repr(value)
    if isinstance(value, tuple):
        texts = [_text_of(each) for each in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = tuple(getattr(value, f.name) for f in dataclasses.fields(value))
        # The trainer follows from the Params.
        text = _text_of(tuple(each for each in fields if type(each).__name__ != "Trainer"))
        return text and f"{type(value).__module__}.{type(value).__qualname__}{text}"
    return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest_of_file(path: str) -> str:
    try:
        return _digest(objects.read_bytes(path))
    except OSError:
        return ""
