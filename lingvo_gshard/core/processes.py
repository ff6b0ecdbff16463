"""The processes of a cluster that train together: who this one is, and how they share values.

jax counts the processes that `jax.distributed` has connected. In the usual case of one process, the
functions here return at once and start nothing.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from typing import Any

import numpy as np

from lingvo_gshard.core.lazy import jax, multihost_utils


def count() -> int:
    """Returns the number of processes."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
    """Returns the index of this process, from 0."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def is_main() -> bool:
    """Returns whether this process prints and writes for all."""
    return index() == 0


def gather(value: Any) -> list[Any]:
    """Returns every process's value, of JSON types, in the order of the processes.

    All processes must make this call, in the same order among their collective computations. The
    call waits for computations that were started before.
    """
    if count() == 1:
        return [value]
    content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(content.size))
    # Powers of two, so that few lengths are compiled.
    padded = np.zeros((1 << int(sizes.max()).bit_length(),), np.uint8)
    padded[: content.size] = content
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def from_main(value: Any) -> Any:
    """Returns the main process's value in all processes. See `gather`."""
    return gather(value if is_main() else None)[0]


class SharedError(Exception):
    """An error in one of several processes, raised in all of them."""


def problem_of(error: BaseException) -> str:
    """Returns an error of this process in words that name the process and its host."""
    if isinstance(error, SharedError):
        return str(error)
    return f"process {index()} on {platform.node()}: {type(error).__name__}: {error}"


def together(function: Callable[[], Any]) -> Any:
    """Returns `function()`. All processes must make this call; see `gather`.

    Raises:
      SharedError: the call failed in one of several processes. Names the process and the error. A
        single process raises its own error instead.
    """
    if count() == 1:
        return function()
    result = problem = None
    try:
        result = function()
    except Exception as error:
        problem = problem_of(error)
    if problems := [each for each in gather(problem) if each]:
        raise SharedError(problems[0])
    return result


class Ballot:
    """Finds the highest of one number per process, without waiting for it.

    All processes must call `cast` at the same points among their collective computations. The
    result is available when all computations that were started before are done.
    """

    def __init__(self):
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("device",))
        self._split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("device"))
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self._find_highest = jax.jit(lambda numbers: numbers.max(), out_shardings=replicated)
        self._highest: jax.Array | None = None

    def cast(self, number: int) -> None:
        """Starts a vote with this process's number."""
        own = np.array([number], np.int32)
        numbers = jax.make_array_from_callback(
            (self._split.num_devices,), self._split, lambda _: own
        )
        self._highest = self._find_highest(numbers)

    def highest(self) -> int:
        """Returns the highest number of the last vote; 0 if there was none."""
        return 0 if self._highest is None else int(self._highest.addressable_data(0))
