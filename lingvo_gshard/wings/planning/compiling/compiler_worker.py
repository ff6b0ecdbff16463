"""A process that compiles one program. Its parent may end the process at any time."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import msgspec

from lingvo_gshard.core import jax
from lingvo_gshard.runtime import Program, using_partitioner
from lingvo_gshard.wings.cluster.child_process import answer_stream, end_with_parent
from lingvo_gshard.wings.planning.compiling import cache
from lingvo_gshard.wings.planning.machines import topologies


class Request(msgspec.Struct, frozen=True):
    """A pickled Program to compile, the directory for the compiler's files, and its settings.

    `effort` has values of jax's configuration by name, `options` options of the compiler.
    """

    program: bytes
    directory: str
    effort: dict[str, float]
    options: dict[str, Any]


class Answer(msgspec.Struct, frozen=True):
    """The end of the compilation: the compiler's refusal, or the bytes of code."""

    error: str = ""
    code: int = 0


def main(topology: str) -> None:
    """Loads a compiler, compiles the program that comes on standard input, writes an Answer."""
    # Compilers may print.
    answers = answer_stream()
    devices = topologies.get(topology).compile_devices()
    size = int(sys.stdin.buffer.readline() or 0)
    if not size:
        return
    request = msgspec.msgpack.decode(sys.stdin.buffer.read(size), type=Request)
    end_with_parent()
    for name, value in request.effort.items():
        jax.config.update(name, value)
    # The partitioner's warnings go to standard error, which the parent reads.
    jax.config.update("jax_logging_level", "WARNING")
    program: Program = pickle.loads(request.program)
    try:
        lowered = program.lower(devices)
        with using_partitioner(program.partitioner):
            compiled = lowered.compile({**request.options, **cache.options(request.directory)})
        analysis: Any = compiled.memory_analysis()
        answer = Answer(code=analysis.generated_code_size_in_bytes)
    except jax.errors.JaxRuntimeError as error:
        answer = Answer(error=str(error))
    answers.write(msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
