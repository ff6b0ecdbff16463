"""Arrays of a checkpoint by path, and digests of them that do not depend on their sharding.

An array is a NumPy array or a jax.Array, which may be sharded over the devices of several
processes. Each process writes and reads its own shards. The files do not depend on the sharding.

An array is read as unsigned words w_i in C order. An element of up to 4 bytes is one word; a longer
one is split into words of 4 bytes. The digest is the sum of w_i (2 i + 1) mod 2^64. Each shard
contributes a term that depends only on its words and its offset. A change of a single word always
changes the digest, because 2 i + 1 is odd and has an inverse mod 2^64.
"""

from __future__ import annotations

import concurrent.futures
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from lingvo_gshard.core import NestedMap, UserError, processes
from lingvo_gshard.core.lazy import jax, ocp
from lingvo_gshard.training.run.checkpoint.orbax_storage import prepare_orbax

MODULUS = 2**64
_BLOCK = 2**16  # Words summed at once, few enough to stay in a core's cache.


def digest(array: np.ndarray | jax.Array, counts: bool = True) -> int:
    """Returns this process's term of an array's digest. The terms add up to it, mod 2^64.

    Args:
      array: the array. The process counts the shards of a jax.Array that it holds as first replica.
      counts: whether the process counts a NumPy array. Processes may hold copies of one array; one
        process counts it.
    """
    if not isinstance(array, jax.Array):
        array = np.asarray(array)
        return _part(array, (0,) * array.ndim, array.shape) if counts else 0
    total = 0
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            offset = tuple(part.start or 0 for part in shard.index)
            total += _part(np.asarray(shard.data), offset, array.shape)
    return total % MODULUS


def digest_of_part(
    part: np.ndarray, index: tuple[int, ...], shape: tuple[int, ...], start: int = 0
) -> int:
    """Returns the term of a part of an array. Those of all parts add up to its digest, mod 2^64.

    Args:
      part: elements of the array with these first indices.
      start: the first of the part along the dimension after the indices.
    """
    offset = (*index, start, *(0,) * (part.ndim - 1)) if part.ndim else index
    return _part(part.reshape((1,) * len(index) + part.shape), offset, shape) % MODULUS


def _part(shard: np.ndarray, offset: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Returns the term of a shard at `offset` in an array of `shape`."""
    if not shard.size:
        return 0
    words, offset, shape = _words(shard), (*offset, 0), (*shape, _words_per_element(shard))
    row_axis = _first_of_row(words.shape, shape)
    starts = _starts(words.shape[:row_axis], offset, shape)
    rows = words.reshape(starts.size, -1)
    within = sum(at * _stride(shape, axis) for axis, at in enumerate(offset) if axis >= row_axis)
    return sum(_sums(rows, starts + np.uint64(within % MODULUS))) % MODULUS


def _words_per_element(array: np.ndarray) -> int:
    return max(array.dtype.itemsize // 4, 1)


def _words(array: np.ndarray) -> np.ndarray:
    """Returns the array as unsigned words, with a last dimension over an element's words."""
    width = min(array.dtype.itemsize, 4)
    flat = np.ascontiguousarray(array).reshape(-1).view(f"<u{width}")
    return flat.reshape(*array.shape, _words_per_element(array))


def _first_of_row(part: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Returns the first dimension of the largest contiguous rows of a part."""
    axis = len(shape) - 1
    while axis > 0 and part[axis] == shape[axis]:
        axis -= 1
    return axis


def _stride(shape: tuple[int, ...], axis: int) -> int:
    return math.prod(shape[axis + 1 :])


def _starts(
    leading: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...]
) -> np.ndarray:
    """Returns the index in the whole array of each row's first word: uint64 [rows]."""
    starts = np.zeros((1,), np.uint64)
    for axis, size in enumerate(leading):
        places = (np.arange(size, dtype=np.uint64) + np.uint64(offset[axis])) * np.uint64(
            _stride(shape, axis)
        )
        starts = (starts[:, None] + places).reshape(-1)
    return starts


def _sums(rows: np.ndarray, starts: np.ndarray) -> Iterator[int]:
    """Yields the sums of w_i (2 i + 1) of the blocks of a shard."""
    width = rows.shape[1]
    columns = min(width, _BLOCK)
    height = max(_BLOCK // columns, 1)
    for column in range(0, width, columns):
        end = min(column + columns, width)
        doubled = 2 * np.arange(column, end, dtype=np.uint64) + np.uint64(1)
        for row in range(0, len(rows), height):
            block = rows[row : row + height, column:end].astype(np.uint64)
            of_row = block.sum(axis=1)
            yield int((block * doubled).sum())
            yield int((of_row * (2 * starts[row : row + height])).sum())


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
    """Checks that a checkpoint's arrays fit the model.

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
        for in_model, stored in zip(_kind(array), _kind(found[path]), strict=True):
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


def bytes_to_write(array: Array) -> int:
    """Returns the bytes of an array that this process writes, before compression."""
    if not isinstance(array, jax.Array):
        return array.nbytes if processes.is_main() else 0
    return sum(s.data.nbytes for s in array.addressable_shards if s.replica_id == 0)


def _handler(directory: pathlib.Path) -> Any:
    """Returns a handler of Orbax, whose types allow no pathlib.Path."""
    prepare_orbax(directory)
    return ocp.PyTreeCheckpointHandler()


def _digests(arrays: Mapping[str, Array], counts: bool) -> dict[str, int]:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        parts = pool.map(lambda array: digest(array, counts), arrays.values())
        return dict(zip(arrays, parts, strict=True))


def _restore_argument(sharding: jax.sharding.Sharding | None) -> ocp.RestoreArgs:
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding)


def _kind(array: Any) -> tuple[tuple[int, ...], str]:
    return tuple(array.shape), np.dtype(array.dtype).name


# The parts of a state that `run.json` holds.
IN_RUN_RECORD = ("step", "stopped")
# The file in a checkpoint that has the run's Params.
PARAMS_COPY = "run/params.txt"
