"""PublishedStart: a published model whose weights a run starts with, without an import.

Of a weight that is sharded, each process reads the parts that its own devices hold.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core import NestedMap, Params, jax, objects, stores
from lingvo_gshard.training import Checkpoint, RunRecord, Trainer, run_item
from lingvo_gshard.wings.fine_tuning.starting import PART, initial_factors, references
from lingvo_gshard.wings.open_models.config import CONFIG_FILE
from lingvo_gshard.wings.open_models.importing import PublishedModel
from lingvo_gshard.wings.open_models.lingvo import LingvoModel, is_lingvo
from lingvo_gshard.wings.open_models.transposing import copy

# start and stop of each dimension of a weight.
Box = Sequence[tuple[int, int]]


def is_published(directory: str | os.PathLike) -> bool:
    """Returns whether a directory has a published model, or a path names Lingvo's checkpoint."""
    return is_lingvo(directory) or objects.is_file(stores.path_of(directory) / CONFIG_FILE)


class PublishedStart:
    """A published model to start from.

    Attributes:
      bytes_read: size of what this process has read of the weights.
    """

    def __init__(self, directory: str | os.PathLike, params: Params, say: Callable[[str], None]):
        """Finds the tensors.

        Args:
          directory: the published model, or the prefix of a checkpoint of Lingvo.
          params: the experiment of the new run.
          say: shows a line to the user.

        Raises:
          UserError: files are missing, damaged, or do not fit the config.
        """
        self._directory, self._say = os.fspath(directory), say
        if is_lingvo(directory):
            self._model = LingvoModel(directory, params)
            others = f"{self._model.left_out:,} variables of the optimizer and moving averages"
            say(f"{others} are left out")
        else:
            self._model = PublishedModel.open(directory, params)
        self._folder = tempfile.TemporaryDirectory()
        self.bytes_read = 0
        self._model.write_extras(self.extras)

    @property
    def extras(self) -> pathlib.Path:
        """A directory with the tokenizer's files, and what a later export must know."""
        return pathlib.Path(self._folder.name)

    def checkpoint(self, trainer: Trainer, abstract_state: NestedMap | None) -> Checkpoint:
        """Returns a checkpoint of step 0 with the model's weights.

        Factors of adapters get their initial values.

        Args:
          trainer: the trainer of the new run.
          abstract_state: the state of its runtime. Each process reads what its devices hold.

        Raises:
          UserError: a file cannot be read.
        """
        specs = self._model.mapping.specs
        self._say(f"Starting from the published model in {self._directory}")
        if abstract_state is None:
            arrays: dict[str, Any] = {
                path: self._read(path, _box((slice(None),) * len(spec.shape), spec.shape))
                for path, spec in specs.items()
            }
        else:
            structs = dict(abstract_state[PART].flatten_items())
            arrays = {path: self._sharded(path, structs[path]) for path in specs}
        arrays |= initial_factors(trainer, arrays)
        arrays |= references((path for path, _ in trainer.theta_specs.flatten_items()), arrays)
        record = RunRecord(0, None, run_item.versions(), {})
        return Checkpoint(record, "", self.extras, {PART: arrays})

    def _sharded(self, path: str, struct: jax.ShapeDtypeStruct) -> jax.Array:
        """Reads the parts of a weight that this process's devices hold; returns the weight."""
        parts: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

        def part(index: Any) -> np.ndarray:
            # Several devices may hold the same part.
            box = _box(index, struct.shape)
            if box not in parts:
                parts[box] = self._read(path, box)
            return parts[box]

        assert struct.sharding is not None
        return jax.make_array_from_callback(struct.shape, struct.sharding, part)

    def _read(self, path: str, box: Box) -> np.ndarray:
        """Returns the part of a weight within a box."""
        spec = self._model.mapping.specs[path]
        result = np.empty([stop - start for start, stop in box], np.dtype(spec.dtype))
        for piece, name in self._model.pieces(path):
            depth = len(piece.index)
            places = list(zip(piece.index, box[:depth], strict=True))
            if not all(start <= at < stop for at, (start, stop) in places):
                continue
            wanted = dict(zip(spec.layout[depth:], box[depth:], strict=True))
            found = piece.rearrangement.read_part(self._reader(name), piece.sizes, wanted)
            target = result[tuple(at - start for at, (start, _) in places)]
            copy(found, target) if found.ndim else result.__setitem__(..., found)
        return result

    def _reader(self, name: str) -> Callable[[Box], np.ndarray]:
        """Returns a function that reads a part of a published tensor, and counts its bytes."""
        tensor = self._model.tensors[name]

        def read(box: Box) -> np.ndarray:
            part, nbytes = tensor.read_box(box)
            self.bytes_read += nbytes
            return part

        return read


def _box(index: tuple[slice, ...], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns start and stop of each dimension of a part."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
