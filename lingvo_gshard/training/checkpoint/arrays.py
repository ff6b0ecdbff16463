"""The arrays of a checkpoint's item on disk: what there is, whether it fits, and reading it.

An array is NumPy's, or jax's and then perhaps split over the devices of several processes, of which
each writes and reads its own shards. What is on disk is the same whatever the split was.
"""

from __future__ import annotations

import concurrent.futures
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from lingvo_gshard.training import processes
from lingvo_gshard.training.checkpoint.digests import MODULUS, digest

Array = np.ndarray | jax.Array
Arrays = dict[str, Array]

# Arrays lie on disk in pieces of at most this many bytes, so that a shard can be read from an array
# that was written whole, without holding the whole of it.
_CHUNK_BYTES = 2**26


def save_arguments(arrays: Arrays) -> ocp.args.PyTreeSave:
    """Returns what Orbax needs to write `arrays`."""
    return ocp.args.PyTreeSave(
        arrays, save_args={path: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for path in arrays}
    )


def describe(directory: pathlib.Path) -> dict[str, Any]:
    """Returns path -> an object with shape and dtype, for each array in a directory."""
    return dict(ocp.PyTreeCheckpointHandler().metadata(directory).tree)


def read(directory: pathlib.Path, shardings: Mapping[str, jax.sharding.Sharding | None]) -> Arrays:
    """Returns the arrays of these paths: jax's where there is a sharding, NumPy's where None.

    With several processes each reads what its own devices hold.
    """
    arguments = {path: _restore_argument(sharding) for path, sharding in shardings.items()}
    restore = ocp.args.PyTreeRestore(restore_args=arguments)
    return dict(ocp.PyTreeCheckpointHandler().restore(directory, args=restore))


def check_fit(expected: Mapping[str, Any], found: Mapping[str, Any], what: str) -> None:
    """Raises ValueError naming the paths that are missing, left over, or of other shape or type.

    Both map paths to what has a shape and a dtype; `expected` is the model's.
    """
    wrong = [f"{path} is missing" for path in expected if path not in found]
    wrong += [f"{path} is not in the model" for path in found if path not in expected]
    for path, array in expected.items():
        if path not in found:
            continue
        for attribute in (_shape, _type):
            here, there = attribute(array), attribute(found[path])
            if here != there:
                wrong.append(f"{path} is {there}, the model's is {here}")
    if wrong:
        shown = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise ValueError(f"The checkpoint's {what} do not fit the model: {shown}")


def digests(arrays: Arrays) -> dict[str, int]:
    """Returns the digests of the main process's NumPy arrays and of all processes' jax.Arrays."""
    own = processes.together(lambda: _digests(arrays, processes.is_main()))
    parts = processes.gather(own)
    return {path: sum(part[path] for part in parts) % MODULUS for path in arrays}


def check_digests(arrays: Arrays, expected: Mapping[str, int], what: str) -> None:
    """Raises ValueError naming the arrays that do not have the expected digests."""
    numpys = {path: array for path, array in arrays.items() if isinstance(array, np.ndarray)}
    split = {path: array for path, array in arrays.items() if path not in numpys}

    def check(found: Mapping[str, int]) -> None:
        wrong = sorted(path for path in found if found[path] != expected[path])
        if wrong:
            raise ValueError(f"{what} has other contents than were saved: {', '.join(wrong[:3])}")

    processes.together(lambda: check(_digests(numpys, True)))
    check(digests(split))


def bytes_to_write(arrays: Arrays) -> int:
    """Returns the bytes of `arrays` that this process writes, before compression."""
    return sum(_bytes_to_write(array) for array in arrays.values())


def _digests(arrays: Arrays, counts: bool) -> dict[str, int]:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        parts = pool.map(lambda array: digest(array, counts), arrays.values())
        return dict(zip(arrays, parts, strict=True))


def _bytes_to_write(array: Array) -> int:
    if not isinstance(array, jax.Array):
        return array.nbytes if processes.is_main() else 0
    return sum(s.data.nbytes for s in array.addressable_shards if s.replica_id == 0)


def _restore_argument(sharding: jax.sharding.Sharding | None) -> ocp.RestoreArgs:
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding)


def _shape(array: Any) -> tuple[int, ...]:
    return tuple(array.shape)


def _type(array: Any) -> str:
    return np.dtype(array.dtype).name
