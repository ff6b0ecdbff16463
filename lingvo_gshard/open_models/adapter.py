"""Exports the adapters of a run in the format of Hugging Face's peft: without the base model.

adapter_config.json         rank, alpha and the adapted layers
adapter_model.safetensors   base_model.model.<layer>.lora_A.weight [rank, input], and
                            base_model.model.<layer>.lora_B.weight [output, rank]
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import msgspec
import numpy as np

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.layers.lora import RANK, LoRA, factors_of, is_factor
from lingvo_gshard.open_models.exporting import ExportSource
from lingvo_gshard.open_models.shards import Published, Tensor, write_file
from lingvo_gshard.open_models.table import Rearrangement
from lingvo_gshard.open_models.weight_mapping import Piece
from lingvo_gshard.training.step.trainer import Trainer

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _SUFFIX = "base_model.model.", ".weight"
_INSTEAD = "`format=huggingface` writes a whole model, with merged weights"


@dataclasses.dataclass(frozen=True)
class _Factor:
    """A factor as it is published.

    Attributes:
      tensor: its name, shape and type.
      weight: path of the factor in theta.
      index: which layer's it is, in a stack.
      rearrangement: from the published dimensions to ours.
      sizes: size of each letter.
    """

    tensor: Tensor
    weight: str
    index: tuple[int, ...]
    rearrangement: Rearrangement
    sizes: dict[str, int]


@dataclasses.dataclass(frozen=True)
class PublishedAdapter:
    """The adapters of a checkpoint.

    Attributes:
      source: the checkpoint.
      lora: Params of the adapters.
      layers: names of the published layers that have adapters.
    """

    source: ExportSource
    lora: Params
    layers: tuple[str, ...]
    _factors: tuple[_Factor, ...]

    @classmethod
    def of(cls, source: ExportSource, trainer: Trainer) -> PublishedAdapter:
        """Returns the adapters of a checkpoint.

        Args:
          source: the checkpoint.
          trainer: the run's trainer.

        Raises:
          UserError: the run has no adapters, other weights were trained as well, or peft has no
            adapters for a weight.
        """
        lora = source.params.task.lora
        if not lora.rank:
            raise UserError(f"`format=peft` writes adapters, and task.lora.rank is 0; {_INSTEAD}")
        specs = trainer.theta_specs.flatten()
        others = [s.path for s in specs if trainer.optimizer.moves(s) and not is_factor(s.path)]
        if others:
            raise UserError(
                f"`format=peft` writes adapters only, but {others[0]} was trained, too; {_INSTEAD}"
            )
        layers, factors = [], []
        for name, pieces in source.mapping.pieces.items():
            for piece in pieces:
                found = _factors_of_piece(source, name, piece)
                if found:
                    layers.append(name.removesuffix(_SUFFIX))
                    factors += found
        return cls(source, lora, tuple(layers), tuple(factors))

    @property
    def nbytes(self) -> int:
        """The size of the factors in bytes."""
        return sum(factor.tensor.nbytes for factor in self._factors)

    def write(self, directory: pathlib.Path) -> None:
        """Writes the files of peft.

        Args:
          directory: an empty directory.

        Raises:
          OSError: a file cannot be written.
          UserError: the checkpoint is damaged.
        """
        text = msgspec.json.format(msgspec.json.encode(self._config()), indent=1)
        (directory / CONFIG_FILE).write_bytes(text)
        file = directory / WEIGHTS_FILE
        tensors = [
            Published(f.tensor.name, f.tensor.shape, f.tensor.dtype, file) for f in self._factors
        ]
        write_file(tensors, self._values())

    def _values(self) -> Iterator[np.ndarray]:
        # Imports TensorStore, which mistakes need not wait for.
        from lingvo_gshard.training.run.checkpoint.streamed import WeightReader

        source = self.source
        reader = WeightReader(source.directory, source.checkpoint, source.item)
        for factor in self._factors:
            published = np.zeros(factor.tensor.shape, np.float32)
            part = reader.read(factor.weight, factor.index)
            factor.rearrangement.invert(part, published, factor.sizes)
            yield published

    def _config(self) -> dict[str, object]:
        """Returns what adapter_config.json says. peft has its defaults for all else."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": self.lora.rank,
            "lora_alpha": LoRA.scale(self.lora) * self.lora.rank,
            "lora_dropout": self.lora.input_dropout,
            "target_modules": self._targets(),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }

    def _targets(self) -> list[str]:
        """Returns the last parts of the layers' names, or whole names if these say too much."""
        ends = sorted({layer.rpartition(".")[2] for layer in self.layers})
        named = [
            name.removesuffix(_SUFFIX)
            for name in self.source.mapping.pieces
            if name.removesuffix(_SUFFIX).rpartition(".")[2] in ends
        ]
        return ends if set(named) == set(self.layers) else list(self.layers)


def _factors_of_piece(source: ExportSource, name: str, piece: Piece) -> list[_Factor]:
    """Returns the factors of the weight that a published tensor holds; none without an adapter.

    Raises:
      UserError: peft has no adapter for such a tensor.
    """
    specs = dict(source.specs.flatten_items())
    paths = factors_of(piece.weight)
    if paths[0] not in specs:
        return []
    spec = specs[piece.weight]
    arrangements = piece.rearrangement.of_factors(spec.inputs, RANK)
    if arrangements is None or len(piece.index) != spec.stacked or not name.endswith(_SUFFIX):
        raise UserError(
            f"`format=peft`: peft has no adapter for {piece.weight}, a part of the published "
            f"tensor {name}; {_INSTEAD}"
        )
    factors = []
    for letter, path, rearrangement in zip("AB", paths, arrangements, strict=True):
        sizes = {**piece.sizes, RANK: source.params.task.lora.rank}
        full = f"{_PREFIX}{name.removesuffix(_SUFFIX)}.lora_{letter}{_SUFFIX}"
        tensor = Tensor(full, rearrangement.published_shape(sizes), "F32")
        factors.append(_Factor(tensor, path, piece.index, rearrangement, sizes))
    return factors
