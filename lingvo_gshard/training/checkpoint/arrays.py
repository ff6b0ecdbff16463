"""Reads, writes and checks the arrays of one item of a checkpoint.

An array is a NumPy array or a jax.Array, which may be sharded over the devices of several
processes. Each process writes and reads its own shards. The files do not depend on the sharding.
"""

from __future__ import annotations

import concurrent.futures
import pathlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files.paths import is_bucket
from lingvo_gshard.core.lazy import jax, ocp
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training import processes
from lingvo_gshard.training.checkpoint.digests import MODULUS, digest

Array: TypeAlias = "np.ndarray | jax.Array"
# Maps a dotted path to an array.
Arrays: TypeAlias = "dict[str, Array]"

# The largest piece of an array on disk, in bytes. A process can read its shard of an array that was
# written unsharded without loading all of it.
_CHUNK_BYTES = 2**26


def save_arguments(arrays: Arrays) -> ocp.args.PyTreeSave:
    """Returns Orbax's arguments for writing `arrays`."""
    return ocp.args.PyTreeSave(
        arrays, save_args={path: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for path in arrays}
    )


def describe(directory: pathlib.Path) -> dict[str, Any]:
    """Returns path -> an object with shape and dtype, for each array in a directory."""
    return dict(_handler(directory).metadata(directory).tree)


def read(directory: pathlib.Path, shardings: Mapping[str, jax.sharding.Sharding | None]) -> Arrays:
    """Reads arrays; each process reads what its own devices hold.

    Args:
      directory: the item.
      shardings: path -> sharding of the jax.Array to read. None reads a NumPy array.
    """
    arguments = {path: _restore_argument(sharding) for path, sharding in shardings.items()}
    restore = ocp.args.PyTreeRestore(restore_args=arguments)
    return dict(_handler(directory).restore(directory, args=restore))


def unflatten(specs: NestedMap, arrays: Arrays, name: str) -> NestedMap:
    """Returns `arrays` as a tree.

    Args:
      specs: a tree of VariableSpec, whose structure, shapes and dtypes the arrays must have.
      arrays: the arrays by dotted path.
      name: names the arrays in messages, such as "weights".

    Raises:
      UserError: names the arrays that are missing, left over, or of another shape or dtype.
    """
    expected = dict(specs.flatten_items())
    check_fit(expected, arrays, name)
    return specs.pack(arrays[path] for path in expected)


def check_fit(expected: Mapping[str, Any], found: Mapping[str, Any], name: str) -> None:
    """Checks that arrays are those of the model.

    Args:
      expected: path -> an object with shape and dtype, from the model.
      found: path -> an object with shape and dtype, from the checkpoint.
      name: names the arrays in messages, such as "weights".

    Raises:
      UserError: names the arrays that are missing, left over, or of another shape or dtype.
    """
    wrong = [f"{path} is missing" for path in expected if path not in found]
    wrong += [f"{path} is not in the model" for path in found if path not in expected]
    for path, array in expected.items():
        if path not in found:
            continue
        for attribute in (_shape, _dtype):
            in_model, stored = attribute(array), attribute(found[path])
            if in_model != stored:
                wrong.append(f"{path} is {stored}, the model's is {in_model}")
    if wrong:
        shown = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise UserError(f"The checkpoint's {name} do not fit the model: {shown}")


def digests(arrays: Arrays) -> dict[str, int]:
    """Returns path -> digest. Counts the main process's NumPy arrays and everyone's jax.Arrays."""
    own = processes.together(lambda: _digests(arrays, processes.is_main()))
    parts = processes.gather(own)
    return {path: sum(part[path] for part in parts) % MODULUS for path in arrays}


def check_digests(arrays: Arrays, expected: Mapping[str, int], name: str) -> None:
    """Raises ValueError naming the arrays that do not have the expected digests."""
    on_host = {path: array for path, array in arrays.items() if isinstance(array, np.ndarray)}
    sharded = {path: array for path, array in arrays.items() if path not in on_host}

    def check(found: Mapping[str, int]) -> None:
        wrong = sorted(path for path in found if found[path] != expected[path])
        if wrong:
            raise UserError(f"{name} has other contents than were saved: {', '.join(wrong[:3])}")

    processes.together(lambda: check(_digests(on_host, True)))
    check(digests(sharded))


def bytes_to_write(arrays: Arrays) -> int:
    """Returns the bytes of `arrays` that this process writes, before compression."""
    return sum(_bytes_to_write(array) for array in arrays.values())


def _handler(directory: pathlib.Path) -> ocp.PyTreeCheckpointHandler:
    if is_bucket(directory):
        # Imports Orbax, which a start from the cache does not need.
        from lingvo_gshard.training.checkpoint import in_bucket

        in_bucket.teach_orbax()
    return ocp.PyTreeCheckpointHandler()


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


def _dtype(array: Any) -> str:
    return np.dtype(array.dtype).name
