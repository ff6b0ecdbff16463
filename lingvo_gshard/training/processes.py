"""Several processes that run one program: which of them this is, and what they tell one another.

jax counts them once `jax.distributed` has brought them together. Alone, which is the usual case,
everything here answers at once and starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def count() -> int:
    """Returns the number of processes."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
    """Returns the number of this process, from 0."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def is_main() -> bool:
    """Whether this process is the one that prints and writes what all share."""
    return index() == 0


def gather(value: Any) -> list[Any]:
    """Returns every process's value, made of JSON types, in the order of the processes.

    All processes must call this, in the same order among all that they compute together. It waits
    for what has been started before.
    """
    if count() == 1:
        return [value]
    content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(content.size))
    # Powers of two, so that few lengths are ever compiled.
    padded = np.zeros((1 << int(sizes.max()).bit_length(),), np.uint8)
    padded[: content.size] = content
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def from_main(value: Any) -> Any:
    """Returns the main process's value to all; see `gather`."""
    return gather(value if is_main() else None)[0]


class SharedError(Exception):
    """What went wrong in one of several processes, raised in all of them."""


def together(function: Callable[[], Any]) -> Any:
    """Returns `function()`, which all processes call; if it fails in one, it fails in all.

    Alone its own error is raised, else SharedError saying what and where; see `gather`.
    """
    if count() == 1:
        return function()
    result = problem = None
    try:
        result = function()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    for process, reason in enumerate(gather(problem)):
        if reason:
            raise SharedError(f"process {process}: {reason}")
    return result


class Ballot:
    """One small number of each process, of which all learn the highest without waiting for it.

    All processes must cast at the same points of what they compute together. The result is known
    when everything that was started before the casting is done.
    """

    def __init__(self):
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("device",))
        self._split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("device"))
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self._find_highest = jax.jit(lambda numbers: numbers.max(), out_shardings=whole)
        self._highest: jax.Array | None = None

    def cast(self, number: int) -> None:
        """Casts this process's number."""
        mine = np.array([number], np.int32)
        numbers = jax.make_array_from_callback(
            (self._split.num_devices,), self._split, lambda _: mine
        )
        self._highest = self._find_highest(numbers)

    def highest(self) -> int:
        """Returns the highest number of the last casting; 0 before any."""
        return 0 if self._highest is None else int(self._highest.addressable_data(0))
