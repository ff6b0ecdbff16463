"""Writes safetensors files whose tensors arrive one by one.

The format (https://github.com/huggingface/safetensors#format) is a header in JSON, which needs only
shapes and types, and then the bytes of all tensors. The safetensors package writes tensors that are
all in memory.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

import numpy as np

from lingvo_gshard.open_models.shards import INDEX_FILE, Published, Tensor, dtype_of

# The largest file, in bytes. A tensor that is larger has a file of its own.
FILE_BYTES = 5 * 10**9
_ALIGNMENT = 8


def plan_files(
    tensors: Sequence[Tensor], directory: pathlib.Path, file_bytes: int = FILE_BYTES
) -> list[list[Published]]:
    """Returns the tensors of each file, in the order in which they must arrive.

    Args:
      tensors: all tensors.
      directory: where the files will be.
      file_bytes: the largest size of a file.
    """
    # Of tensors in descending order of their elements' sizes, each begins at a multiple of its own.
    ordered = sorted(tensors, key=lambda tensor: -dtype_of(tensor.dtype).itemsize)
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in ordered:
        if groups[-1] and size + tensor.nbytes > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return [
        [Published(t.name, t.shape, t.dtype, directory / _file_name(n, len(groups))) for t in group]
        for n, group in enumerate(groups, 1)
    ]


def write_file(tensors: Sequence[Published], values: Iterator[np.ndarray]) -> None:
    """Writes one file.

    Args:
      tensors: what it holds, as `plan_files` returns it.
      values: the tensors in this order; a value is taken when the one before it is written.

    Raises:
      OSError: the file cannot be written.
    """
    with open(tensors[0].file, "xb") as file:
        _write_header(file, tensors)
        for tensor, value in zip(tensors, values, strict=True):
            array = np.ascontiguousarray(value, dtype_of(tensor.dtype))
            assert array.shape == tensor.shape, (tensor, array.shape)
            file.write(array.reshape(-1).view(np.uint8).data)


def write_index(files: Sequence[Sequence[Published]], directory: pathlib.Path) -> None:
    """Writes the index of several files; one file needs none."""
    if len(files) < 2:
        return
    total = sum(tensor.nbytes for tensors in files for tensor in tensors)
    where: Mapping[str, str] = {t.name: t.file.name for tensors in files for t in tensors}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1)
    (directory / INDEX_FILE).write_text(text + "\n", encoding="utf-8")


def _write_header(file: BinaryIO, tensors: Sequence[Published]) -> None:
    # transformers refuses files that do not name the framework.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
