"""Exports a run as a published model, tensor by tensor."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.data.vocabularies.published_vocabulary import RECORD_FILE, copy_files
from lingvo_gshard.layers.lora import factors_of, without_factors
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.differences import check_same_task, why_none_fits
from lingvo_gshard.open_models.families import FAMILIES, Family
from lingvo_gshard.open_models.importing import PublishedRecord, read_record
from lingvo_gshard.open_models.shards import (
    FILE_BYTES,
    Tensor,
    dtype_of,
    plan_files,
    write_file,
    write_index,
)
from lingvo_gshard.open_models.weight_mapping import Piece, WeightMapping
from lingvo_gshard.training.run.checkpoint.run_item import Checkpoint, read_run
from lingvo_gshard.training.step.trainer import Trainer

# Threads that read and rearrange tensors.
_THREADS = 3
# Tensors are made at the same time up to this size together. A larger tensor is made alone.
_BYTES_AT_ONCE = 2**26
# The published types of weights that were not imported.
_TYPES = {"float32": "F32", "bfloat16": "BF16"}


@dataclasses.dataclass(frozen=True)
class ExportSource:
    """A checkpoint that is to become a published model.

    Attributes:
      directory: the checkpoint.
      checkpoint: its record.
      item: the item that has the weights.
      params: the run's Params, with the sizes of vocabularies filled in.
      specs: the tree of the weights' VariableSpec.
      family: the family that it is written as.
      record: what was noted when it was imported.
    """

    directory: pathlib.Path
    checkpoint: Checkpoint
    item: str
    params: Params
    specs: NestedMap
    family: Family
    record: PublishedRecord

    @classmethod
    def open(
        cls, directory: pathlib.Path, item: str, params: Params, trainer: Trainer
    ) -> ExportSource:
        """Reads the record of a checkpoint.

        Args:
          directory: the checkpoint.
          item: the item that has the weights.
          params: the run's Params.
          trainer: the run's trainer.

        Raises:
          UserError: no family computes what the run's model computes; the message says why.
        """
        checkpoint = read_run(directory)
        record = read_record(checkpoint.extras)
        if record is None:
            raise UserError(
                f"the run of {params.name} was not imported, and no published family describes it: "
                f"{why_none_fits(trainer.task.p)}. `format=safetensors` writes its weights"
            )
        family = FAMILIES[record.model_type]
        config = PublishedConfig.load(checkpoint.extras)
        check_same_task(params.task, family, config)
        return cls(directory, checkpoint, item, params, trainer.theta_specs, family, record)

    @property
    def nbytes(self) -> int:
        """The size of the published tensors in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def write(self, directory: pathlib.Path, file_bytes: int = FILE_BYTES) -> None:
        """Writes config.json, safetensors and the tokenizer's files.

        Args:
          directory: an empty directory.
          file_bytes: the largest size of a file of weights.

        Raises:
          OSError: a file cannot be written.
          UserError: the checkpoint is damaged.
        """
        copy_files(self.checkpoint.extras, directory)
        (directory / RECORD_FILE).unlink()
        files = plan_files(self._tensors(), directory, file_bytes)
        values = _Values(self)
        for tensors in files:
            write_file(tensors, values.of(tensors))
        write_index(files, directory)

    @functools.cached_property
    def mapping(self) -> WeightMapping:
        """The places of the published tensors."""
        return WeightMapping.of(self.family.table, without_factors(self.specs))

    def _tensors(self) -> list[Tensor]:
        """Returns the published tensors, in the order of the weights."""
        order = {path: number for number, path in enumerate(self.mapping.specs)}
        items = sorted(
            self.mapping.pieces.items(),
            key=lambda item: (order[item[1][0].weight], item[1][0].index),
        )
        return [
            Tensor(name, pieces[0].published_shape, self._dtype(name, pieces[0]))
            for name, pieces in items
        ]

    def _dtype(self, name: str, piece: Piece) -> str:
        usual = _TYPES[self.mapping.specs[piece.weight].dtype]
        return self.record.dtypes.get(name, usual)


class _Values:
    """Makes published tensors from the weights of a checkpoint."""

    def __init__(self, source: ExportSource):
        # Imports TensorStore, which mistakes need not wait for.
        from lingvo_gshard.training.run.checkpoint.streamed import WeightReader

        self._reader = WeightReader(source.directory, source.checkpoint, source.item)
        self._mapping = source.mapping
        self._specs = dict(source.specs.flatten_items())
        self._scale = source.params.task.lora.cls.scale(source.params.task.lora)

    def of(self, tensors: Sequence[Tensor]) -> Iterator[np.ndarray]:
        """Yields the values of tensors, in order. Threads make several at a time."""
        pending: collections.deque[tuple[int, concurrent.futures.Future]] = collections.deque()
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            for tensor in tensors:
                while pending and sum(n for n, _ in pending) + tensor.nbytes > _BYTES_AT_ONCE:
                    yield pending.popleft()[1].result()
                pending.append((tensor.nbytes, pool.submit(self._value, tensor)))
            while pending:
                yield pending.popleft()[1].result()

    def _value(self, tensor: Tensor) -> np.ndarray:
        pieces = list(self._mapping.pieces[tensor.name])
        dtype = np.dtype(self._mapping.specs[pieces[0].weight].dtype)
        published = np.empty(tensor.shape, dtype)
        if len(pieces) > 1 or pieces[0].published_shape != tensor.shape:
            published[...] = 0
        for piece in pieces:
            piece.rearrangement.invert(self._merged(piece), published, piece.sizes)
        return published.astype(dtype_of(tensor.dtype), copy=False)

    def _merged(self, piece: Piece) -> np.ndarray:
        """Returns a part of a weight, merged with its adapter if it has one."""
        part = self._reader.read(piece.weight, piece.index)
        names = factors_of(piece.weight)
        if names[0] not in self._specs:
            return part
        layouts = [self._specs[name].layout[len(piece.index) :] for name in (*names, piece.weight)]
        a, b = (self._reader.read(name, piece.index) for name in names)
        product = np.einsum(f"{layouts[0]},{layouts[1]}->{layouts[2]}", a, b, optimize=True)
        return (part.astype(np.float32) + self._scale * product).astype(part.dtype)
