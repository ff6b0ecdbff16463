"""Compiles for TPUs and GPUs in a process of its own, which ends when a plan's data are there.

libtpu and XLA's compiler for GPUs spend nine tenths of their time on generating code for each
operation, after the program is optimized, scheduled and assigned to memory. A plan needs no code,
but the compilers have no option to stop before this stage. So the process is ended.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import select
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from lingvo_gshard.core import jax
from lingvo_gshard.runtime import Program
from lingvo_gshard.wings.cluster.child_process import start_module
from lingvo_gshard.wings.hlo import names
from lingvo_gshard.wings.planning.compiling import cache
from lingvo_gshard.wings.planning.compiling.cache import OptimizedHlo
from lingvo_gshard.wings.planning.compiling.compiler_worker import Answer, Request
from lingvo_gshard.wings.planning.machines.topologies import Topology

_MODULE = "lingvo_gshard.wings.planning.compiling.compiler_worker"
_POLL_SECONDS = 0.05
# absl begins a line about a failed check so: "F1126 00:18:02.493076".
_FATAL = re.compile(r"F\d{4} ")
# Code takes 1% to 2% of a TPU. A program that leaves less than this share of the memory is compiled
# to the end, so that the verdict is the compiler's own. XLA counts no code in a GPU's memory.
_SHARE_FOR_CODE = 0.05
# The code of large convolutions and attention takes minutes. A plan without the code is worth more
# than the last percent of its memory.
_MOST_CODE_SECONDS = 30.0
# Settings of jax that change what is compiled.
EFFORT = ("jax_exec_time_optimization_effort", "jax_memory_fitting_effort")


class CompilerProcess(contextlib.AbstractContextManager["CompilerProcess"]):
    """A process that compiles one program for a topology. Used as a context manager."""

    def __init__(self, topology: Topology):
        """Starts the process, which loads the compiler."""
        self._topology = topology
        self._directory = tempfile.TemporaryDirectory(prefix="lingvo_gshard-")
        self._log = tempfile.TemporaryFile()
        self._process = start_module(_MODULE, topology.name, stderr=self._log)

    def __exit__(self, *_: object) -> None:
        """Ends the process and removes its files."""
        self._process.kill()
        self._process.communicate()
        self._log.close()
        self._directory.cleanup()

    def compile(
        self,
        program: Program,
        generates_code: bool,
        on_code: Callable[[], None],
        options: Mapping[str, Any] | None = None,
    ) -> OptimizedHlo:
        """Compiles a program as far as a plan needs it.

        Args:
          generates_code: whether to generate the device's code in any case. Else it is generated
            only if the program nearly fills the memory, and given up after half a minute.
          on_code: called before code is generated.

        Raises:
          jax.errors.JaxRuntimeError: the compiler refused the program, or its process ended.
        """
        started = time.monotonic()
        self._send(program, dict(options or {}))
        proto, memory = b"", {}
        while self._process.poll() is None:
            if cache.is_accepted(self._directory.name):
                proto, memory = cache.read(self._directory.name, code=0)
                break
            time.sleep(_POLL_SECONDS)
        limit = (1 - _SHARE_FOR_CODE) * self._topology.chip.usable_bytes
        is_nearly_full = self._topology.compiler == "tpu" and memory.get("peak", 0) > limit
        is_needed = not memory or generates_code
        if memory and (is_needed or is_nearly_full):
            on_code()
        has_code = is_needed or (is_nearly_full and self._answers_soon())
        if has_code:
            proto, memory = cache.read(self._directory.name, self._answer().code)
        share = memory["peak"] / self._topology.chip.usable_bytes
        return OptimizedHlo(
            proto=proto,
            memory=memory,
            seconds=time.monotonic() - started,
            full_replications=names.full_replications(self._output()),
            has_code=has_code,
            note=_without_code(share) if is_nearly_full and not has_code else "",
        )

    def _send(self, program: Program, options: dict[str, Any]) -> None:
        effort = {name: getattr(jax.config, name) for name in EFFORT}
        request = Request(pickle.dumps(program), self._directory.name, effort, options)
        content = msgspec.msgpack.encode(request)
        assert self._process.stdin
        try:
            self._process.stdin.write(b"%d\n" % len(content) + content)
            self._process.stdin.flush()
        except BrokenPipeError:
            self._answer()

    def _answers_soon(self) -> bool:
        """Returns whether the process answers, or ends, while a plan waits for the code."""
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], _MOST_CODE_SECONDS)
        return bool(ready)

    def _answer(self) -> Answer:
        """Waits for the end of the compilation. Raises JaxRuntimeError if it failed."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        answer = msgspec.json.decode(line, type=Answer) if line else Answer(self._last_words())
        if answer.error:
            raise jax.errors.JaxRuntimeError(answer.error)
        return answer

    def _last_words(self) -> str:
        """Describes how the process ended without an answer."""
        code = self._process.wait()
        lines = self._output().strip().splitlines() or ["no output"]
        # A check that fails writes its reason first, then stacks.
        reason = next((line for line in lines if _FATAL.match(line)), lines[-1])
        return f"the compiler's process ended with exit code {code}: {reason}"

    def _output(self) -> str:
        """Returns what the process has written to standard error."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")


def _without_code(share: float) -> str:
    return (
        f"libtpu had not generated the code after {_MOST_CODE_SECONDS:.0f} s: the step takes "
        f"{share:.1%} of the memory without its code, which usually takes 1% to 2%, so that it may "
        "not fit"
    )
