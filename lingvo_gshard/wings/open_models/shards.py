"""Shards: the safetensors files of a published model, read one tensor at a time.

safetensors (https://github.com/huggingface/safetensors) holds no code. Formats that do, such as
pickle, are refused.

The format (https://github.com/huggingface/safetensors#format) is a header in JSON, which needs only
shapes and types, and then the bytes of all tensors. The safetensors package writes tensors that are
all in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, cast

import ml_dtypes  # noqa: F401  NumPy then knows bfloat16.
import msgspec
import numpy as np
import safetensors

from lingvo_gshard.core import UserError, atomic, explained, names, objects

SUFFIX = ".safetensors"
INDEX_FILE = "model.safetensors.index.json"
# The only file of a model that fits into one.
_WHOLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_CONVERSION = (
    "model.save_pretrained(DIR) of transformers writes safetensors, and so does "
    "https://huggingface.co/spaces/safetensors/convert"
)
# Names of tensors with these endings are in older files. The config determines the tensors.
_COMPUTED = (".rotary_emb.inv_freq",)
# A run of fewer adjacent bytes is read together with its neighbors, which takes less time.
_LEAST_RUN = 512
# The types that weights are read in.
_DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"I64": "int64", "I32": "int32"},
}
# The types of packed weights, which are no weights without their scales.
_PACKED_DTYPES = {"F8_E4M3": "float8_e4m3fn", "U8": "uint8"}


# start and stop of each dimension.
Box = Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """The header of a published tensor.

    Attributes:
      dtype: its published type, such as "BF16".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


class Source(Tensor):
    """A published tensor that can be read, packed or not."""

    __slots__ = ()

    def read(self) -> np.ndarray:
        """Returns the tensor.

        Raises:
          UserError: the file cannot be read.
        """
        return self.read_box([(0, size) for size in self.shape])[0]

    def read_box(self, box: Box) -> tuple[np.ndarray, int]:
        """Returns a part of the tensor, and the number of bytes that were read for it.

        Args:
          box: start and stop of the part in each dimension.

        Raises:
          UserError: the file cannot be read.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, slots=True)
class Published(Source):
    """A published tensor in its file, not yet read.

    Attributes:
      file: the file that holds it.
      start: its first byte there.
    """

    file: pathlib.Path
    start: int = 0

    def read_box(self, box: Box) -> tuple[np.ndarray, int]:
        """Returns a part of the tensor; see the base class."""
        whole = list(enumerate(self.shape))
        # Dimensions after `inner` are read whole, dimensions before `inner` index by index.
        inner = max((d for d, size in whole if box[d] != (0, size)), default=0)
        while inner and self._run_bytes(inner, box[inner]) < _LEAST_RUN:
            inner -= 1
        outer = [stop - start for start, stop in box[:inner]]
        run = [box[inner], *((0, size) for size in self.shape[inner + 1 :])] if box else []
        array = np.empty([*outer, *(b - a for a, b in run)], dtype_of(self.dtype))
        # Read, not mapped: a page that is mapped costs more than to copy it.
        target = memoryview(array.reshape(-1).view(np.uint8).data)
        length = array.nbytes // max(math.prod(outer), 1)
        steps = [self._run_bytes(d, (0, 1)) for d in range(len(self.shape))]
        starts = [start for start, _ in box[:inner]]
        with self._opened() as file:
            for number, index in enumerate(np.ndindex(*outer)):
                place = sum((at + i) * n for at, i, n in zip(starts, index, steps, strict=False))
                place += box[inner][0] * steps[inner] if box else 0
                into = target[number * length : (number + 1) * length]
                self._read_run(file, self.start + place, into)
        rest = [slice(a, b) for a, b in box[inner + 1 :]]
        return array[(..., *rest)] if rest else array, array.nbytes

    def _run_bytes(self, dimension: int, part: tuple[int, int]) -> int:
        """Returns the size of a part of a dimension with all of the dimensions after it."""
        below = math.prod(self.shape[dimension + 1 :]) * dtype_of(self.dtype).itemsize
        return (part[1] - part[0]) * below

    @contextlib.contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        with explained(f"{self.file} cannot be read", OSError):
            with open(self.file, "rb", buffering=0) as file:
                yield cast(BinaryIO, file)

    def _read_run(self, file: BinaryIO, start: int, into: memoryview) -> None:
        """Reads the bytes from `start` on."""
        file.seek(start)
        while len(into):
            count = cast(io.RawIOBase, file).readinto(into)
            if not count:
                raise UserError(f"{self.file} is damaged or cut off: {self.name} lacks bytes")
            into = into[count:]


def read_headers(directory: pathlib.Path) -> dict[str, Published]:
    """Returns the tensors of a published model by name, from the headers of all files.

    Args:
      directory: the published model.

    Raises:
      UserError: there are no files of weights, or only pickles; a file is damaged, missing, or not
        in the index; a tensor is in two files, or not where the index says.
    """
    index = _index(directory)
    tensors: dict[str, Published] = {}
    for name in sorted(set(index.values())) if index else _files(directory):
        for tensor in tensors_in(directory / name):
            known = tensors.setdefault(tensor.name, tensor)
            if known is not tensor:
                raise UserError(f"{directory}: {tensor.name} is in {known.file.name} and in {name}")
    _check_index(directory / INDEX_FILE, index, tensors)
    return tensors


def _check_index(
    path: pathlib.Path, index: Mapping[str, str], tensors: Mapping[str, Published]
) -> None:
    for name, file in index.items():
        found = tensors.get(name)
        if found is None or found.file.name != file:
            where = f"it is in {found.file.name}" if found else "no file has it"
            raise UserError(f"{path}: {name} should be in {file}, but {where}")
    left = [name for name in tensors if index and name not in index]
    if left:
        raise UserError(f"{path} lacks {left[0]}, which {tensors[left[0]].file.name} has")


def check_tensors(
    tensors: Mapping[str, Source],
    shapes: Mapping[str, tuple[int, ...]],
    left_out: Iterable[str],
    where: pathlib.Path,
) -> None:
    """Checks that a model has the tensors that its config asks for, and no unknown tensors.

    Tensors without values are ignored. A config with 0 shared experts has such tensors.

    Args:
      tensors: name -> tensor.
      shapes: name -> shape of each tensor that the model needs.
      left_out: beginnings of the names of tensors that the model does not need.
      where: the directory, for messages.

    Raises:
      UserError: tensors are unknown, missing, of another shape, or of a type that is no
        floating-point type.
    """
    beginnings = tuple(left_out)
    wrong = [name for name in shapes if name not in tensors]
    for name, tensor in tensors.items():
        if name in shapes:
            is_weight = not isinstance(tensor, Published) or tensor.dtype in _DTYPES
            if tensor.shape != shapes[name] or not is_weight:
                wrong.append(name)
        elif not (0 in tensor.shape or name.startswith(beginnings) or name.endswith(_COMPUTED)):
            wrong.append(name)
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        said = "; ".join(_misfit(name, tensors.get(name), shapes) for name in wrong[:5])
        raise UserError(f"{where}: the tensors do not fit the model's config: {said}{more}")


def _misfit(name: str, tensor: Source | None, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Returns how a tensor differs from what a model needs."""
    if tensor is None:
        return f"{name} is missing"
    if name not in shapes:
        return f"{name} is unknown. {names.nearest(name, shapes)}"
    if tensor.shape != shapes[name]:
        return f"{name} is {tensor.shape}; {shapes[name]} was expected"
    return f"{name} has the type {tensor.dtype}; one of {', '.join(_DTYPES)} was expected"


def dtype_of(published: str) -> np.dtype:
    """Returns the NumPy type of a published type, such as "BF16"."""
    return np.dtype((_DTYPES | _PACKED_DTYPES)[published])


def _index(directory: pathlib.Path) -> dict[str, str]:
    """Returns name -> file from the index; empty if there is none."""
    path = directory / INDEX_FILE
    try:
        text = objects.read_text(path)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    with explained(f"{path} is no index of safetensors", ValueError, KeyError, RecursionError):
        content = json.loads(text, object_pairs_hook=_unique)
        index = msgspec.convert(content, dict[str, Any])["weight_map"]
        index = msgspec.convert(index, dict[str, str])
    outside = [
        file for file in index.values() if pathlib.PurePath(file).name != file or "\0" in file
    ]
    if outside:
        raise UserError(f"{path} names {outside[0]!r}; files of its own directory were expected")
    missing = [file for file in sorted(set(index.values())) if not (directory / file).is_file()]
    if missing:
        raise UserError(f"{path} names {missing[0]}, which is missing")
    return index


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Returns the pairs of a JSON object; ValueError if a key occurs twice."""
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise UserError(f"{name} occurs twice")
        found[name] = value
    return found


def _files(directory: pathlib.Path) -> list[str]:
    if not directory.is_dir():
        raise UserError(f"`from={directory}`: there is no such directory")
    files = sorted(path.name for path in directory.glob(f"*{SUFFIX}"))
    if _WHOLE in files:
        # Mistral's models have the same weights once more, under the names of another library.
        files = [name for name in files if not name.startswith("consolidated")]
    if files:
        return files
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise UserError(
            f"{directory / pickles[0]} is a pickle, which may run code when it is read. Convert it "
            f"to safetensors: {_CONVERSION}"
        )
    raise UserError(f"{directory} has no {SUFFIX} files; the weights were expected there")


class _Entry(msgspec.Struct, gc=False):
    """A tensor in the header of a file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_OFFSETS = b'"data_offsets"'
_METADATA = "__metadata__"


def tensors_in(path: pathlib.Path) -> list[Published]:
    """Returns the tensors of a file, from its header."""
    header, start = _header(path)
    # The safetensors package checks that places fit shapes, types and the file.
    with _opened(path):
        return [
            Published(name, entry.shape, entry.dtype, path, start + entry.data_offsets[0])
            for name, entry in sorted(header.items())
        ]


def _header(path: pathlib.Path) -> tuple[dict[str, _Entry], int]:
    """Returns the tensors in the header of a file, and where its data begins.

    Raises:
      UserError: a name occurs twice, which the safetensors package accepts, or the file is cut.
    """
    try:
        with objects.open_to_read(path) as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise UserError("it is cut off")
            text = file.read(size)
        raw = atomic.decode(text, dict[str, msgspec.Raw])
        raw.pop(_METADATA, None)
        if text.count(_OFFSETS) != len(raw):
            json.loads(text, object_pairs_hook=_unique)
        decoder = msgspec.json.Decoder(_Entry)
        return {name: decoder.decode(entry) for name, entry in raw.items()}, 8 + size
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}") from None


def _opened(path: pathlib.Path) -> safetensors.safe_open:
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or cut off: {error}") from None


# The largest file, in bytes. A tensor that is larger has a file of its own.
FILE_BYTES = 5 * 10**9
_ALIGNMENT = 8


def by_alignment(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors in the order of a file: each begins at a multiple of its element size."""
    return sorted(tensors, key=lambda tensor: -dtype_of(tensor.dtype).itemsize)


def plan_files(
    tensors: Sequence[Tensor], directory: pathlib.Path, file_bytes: int = FILE_BYTES
) -> list[list[Published]]:
    """Returns the tensors of each file, in the order that `write_file` needs.

    Args:
      directory: where the files will be.
      file_bytes: the largest size of a file.
    """
    ordered = by_alignment(tensors)
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
      tensors: the tensors of the file, as `plan_files` returns them.
      values: the values of the tensors, in the same order. A value is taken when the previous value
        is written.

    Raises:
      OSError: the file cannot be written.
    """
    with open(tensors[0].file, "xb") as file:
        _write_header(file, tensors)
        for tensor, value in zip(tensors, values, strict=True):
            array = np.asarray(value, dtype_of(tensor.dtype), order="C")
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
    return _WHOLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
