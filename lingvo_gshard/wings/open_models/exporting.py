"""Exports a run as a published model, tensor by tensor, or its adapters alone.

Adapters are written in the format of Hugging Face's peft, without the base model:

    adapter_config.json         rank, alpha and the adapted layers
    adapter_model.safetensors   base_model.model.<layer>.lora_A.weight [rank, input], and
                                base_model.model.<layer>.lora_B.weight [output, rank]
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from lingvo_gshard.core import NestedMap, Params, UserError, objects
from lingvo_gshard.tasks import LanguageModelTask, TranslationTask
from lingvo_gshard.training import Checkpoint, Trainer, read_run
from lingvo_gshard.wings.fine_tuning.adapters import RANK, factors_of, is_factor, without_factors
from lingvo_gshard.wings.fine_tuning.lora import LoRA
from lingvo_gshard.wings.fine_tuning.preferences import without_reference
from lingvo_gshard.wings.open_models import shards
from lingvo_gshard.wings.open_models.config import CONFIG_FILE, PACKING, PublishedConfig
from lingvo_gshard.wings.open_models.families import FAMILIES, Family
from lingvo_gshard.wings.open_models.importing import PublishedRecord, read_record, write_config
from lingvo_gshard.wings.open_models.packers import Packer, fp4_packer, fp8_packer
from lingvo_gshard.wings.open_models.weight_mapping import Piece, WeightMapping
from lingvo_gshard.wings.preparation.vocabularies.published_vocabulary import (
    RECORD_FILE,
    SCALES_FILE,
    copy_files,
)
from lingvo_gshard.wings.published_layers.published_attention import PublishedAttention

# (path of a hyperparameter, its value, its value in the other model).
_Difference = tuple[str, str, str]

# More differences than any described model has.
_MANY = 1000
_MOST_SHOWN = 12
_STACKS = ("encoder", "decoder")
# Params that do not change what a trained model computes.
_FREE = objects.table_beside(__file__, "free_params.json", frozenset[str])
_FREE_NODES = frozenset(("execution", "lora", "preferences"))


def check_same_task(task: Params, family: Family, config: PublishedConfig) -> None:
    """Raises ValueError, naming Params, if a config does not describe a task."""
    rows = _differences(_as_published(task), family.task_of(config))
    if rows:
        raise UserError(
            f"{CONFIG_FILE} of {family.keys.architecture} cannot describe this model: "
            f"{_listed(rows)}"
        )


def why_none_fits(task: Params) -> str:
    """Returns why a model fits no family: how it differs from the nearest one.

    Args:
      task: Params of the task, with the sizes of vocabularies filled in.
    """
    cls: Any = task.cls
    if not issubclass(cls, (LanguageModelTask, TranslationTask)):
        return (
            f"its task is {cls.__name__}, and the families ({', '.join(FAMILIES)}) are "
            "language models and translation models"
        )
    task = _as_published(task)
    found = [(_differences_to(task, family), family) for family in FAMILIES.values()]
    rows, nearest = min(found, key=lambda pair: _distance(pair[0]))
    differs = _listed(rows) if rows else "its vocabulary was trained here"
    return f"the nearest is {nearest.keys.architecture}, but {differs}"


def _as_published(task: Params) -> Params:
    """Returns a language model's Params with the attentions that families describe."""
    cls: Any = task.cls
    if not issubclass(cls, LanguageModelTask):
        return task
    task = task.copy()
    decoder, of = task.decoder, PublishedAttention.of
    decoder.layer.self_attention = of(decoder.layer.self_attention)
    decoder.attention_pattern = tuple(map(of, decoder.attention_pattern))
    return task


def _distance(rows: list[_Difference]) -> tuple[bool, int]:
    """Returns a measure of differences. A model without experts is far from one with experts."""
    no_experts = any(path.endswith(".moe_every") and "0" in both for path, *both in rows)
    return no_experts, len(rows)


def _differences_to(task: Params, family: Family) -> list[_Difference]:
    """Returns how a task differs from the one that a family's nearest config describes."""
    try:
        described = family.task_of(PublishedConfig(family.config_of(task), CONFIG_FILE))
    except (AttributeError, ValueError, ZeroDivisionError, StopIteration):
        # The family's config cannot describe a part of this model, such as the kind of router, or
        # experts whose size the stack decides.
        return [("decoder", "made of other parts", family.keys.architecture)] * _MANY
    return _differences(task, described)


def _differences(task: Params, described: Params) -> list[_Difference]:
    """Returns the differences that change what a trained model computes."""
    rows = task.diff(described)
    classes = tuple(path.removesuffix("cls") for path, _, _ in rows if path.endswith(".cls"))
    unused = tuple(_unused(task, described))
    return [
        row
        for row in rows
        if row[0].rpartition(".")[2] not in _FREE
        and _FREE_NODES.isdisjoint(row[0].split("."))
        and not row[0].startswith(unused)
        # A class's own parts are no further difference.
        and (row[0].endswith(".cls") or not row[0].startswith(classes))
    ]


def _unused(task: Params, described: Params) -> Iterator[str]:
    """Yields the beginnings of paths that at least one of the two models does not use."""
    for name in _STACKS:
        stacks = [each.get(name) for each in (task, described) if name in each]
        if not all(stack.is_decoder for stack in stacks):
            yield f"{name}.layer.cross_attention."
        if not all(stack.moe_every for stack in stacks):
            yield f"{name}.moe."


def _listed(rows: list[_Difference]) -> str:
    """Returns the differences as text. What both stacks have in common is said once."""
    paths: dict[_Difference, list[str]] = {}
    for path, ours, theirs in rows:
        stack, _, rest = path.partition(".")
        key = (rest, ours, theirs) if stack in _STACKS else (path, ours, theirs)
        paths.setdefault(key, []).append(f"task.{path}")
    found = [
        f"{' and '.join(sorted(same))} {'is' if len(same) == 1 else 'are'} {_short(ours)}, "
        f"there {_short(theirs)}"
        for (_, ours, theirs), same in paths.items()
    ]
    more = f"; and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    return "; ".join(found[:_MOST_SHOWN]) + more


def _short(value: str) -> str:
    """Returns the text of a value, of a class without its module."""
    is_class = value.startswith("lingvo_gshard.")
    return value.rpartition(".")[2] if is_class else value


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
      in_4_bits: whether tensors that were published in 4 bits are written so.
    """

    directory: pathlib.Path
    checkpoint: Checkpoint
    item: str
    params: Params
    specs: NestedMap
    family: Family
    record: PublishedRecord
    in_4_bits: bool

    @classmethod
    def open(
        cls,
        directory: pathlib.Path,
        item: str,
        params: Params,
        trainer: Trainer,
        in_4_bits: bool = False,
    ) -> ExportSource:
        """Reads the record of a checkpoint.

        Args:
          directory: the checkpoint.
          item: the item that has the weights.
          params: the run's Params.
          trainer: the run's trainer.
          in_4_bits: whether tensors that were published in 4 bits are written so.

        Raises:
          UserError: no family computes what the run's model computes, or nothing was published in
            4 bits; the message says why.
        """
        checkpoint = read_run(directory)
        record = read_record(checkpoint.extras)
        if record is None:
            raise UserError(
                f"the run of {params.name} was not imported, and no published family describes it: "
                f"{why_none_fits(trainer.task.p)}. `format=safetensors` writes its weights"
            )
        if in_4_bits and not record.in_4_bits:
            raise UserError(
                "`format=huggingface_4bit`: no tensor of the imported model was in MXFP4 or NVFP4; "
                "`format=huggingface` writes the model"
            )
        family = FAMILIES[record.model_type]
        config = PublishedConfig.load(checkpoint.extras)
        check_same_task(params.task, family, config)
        return cls(
            directory, checkpoint, item, params, trainer.theta_specs, family, record, in_4_bits
        )

    @property
    def nbytes(self) -> int:
        """The size of the published tensors in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def write(self, directory: pathlib.Path, file_bytes: int = shards.FILE_BYTES) -> None:
        """Writes config.json, safetensors and the tokenizer's files.

        Args:
          directory: an empty directory.
          file_bytes: the largest size of a file of weights.

        Raises:
          OSError: a file cannot be written.
          UserError: the checkpoint is damaged.
        """
        copy_files(self.checkpoint.extras, directory)
        for name in (RECORD_FILE, SCALES_FILE):
            (directory / name).unlink(missing_ok=True)
        self._write_config(directory)
        files = shards.plan_files(self._tensors(), directory, file_bytes)
        values = _Values(self)
        for tensors in files:
            shards.write_file(tensors, values.of(tensors))
        shards.write_index(files, directory)

    @functools.cached_property
    def mapping(self) -> WeightMapping:
        """The places of the published tensors."""
        specs = without_reference(without_factors(self.specs))
        return WeightMapping.of(self.family.table, specs)

    def _write_config(self, directory: pathlib.Path) -> None:
        """Writes config.json again if the export differs from the import in what it says.

        Tensors that were packed may not be, and a family may export another one.
        """
        config = PublishedConfig.load(directory)
        values = dict(self.family.exported(config.values))
        if not self.packers:
            values.pop(PACKING, None)
        if values != config.values:
            write_config(values, directory)

    @functools.cached_property
    def packers(self) -> Mapping[str, Packer]:
        """Name of each tensor that is written with scales -> what packs it."""
        block, in_4_bits = self.record.block, frozenset(self.record.in_4_bits)
        file, found = self.checkpoint.extras / SCALES_FILE, {}
        small = {tensor.name: tensor for tensor in shards.tensors_in(file)} if file.exists() else {}
        for name, pieces in self.mapping.pieces.items():
            shape = pieces[0].published_shape
            if self.in_4_bits and name in in_4_bits:
                found[name] = fp4_packer(name, shape, small)
            elif block and (own := fp8_packer(name, shape, block, small)):
                found[name] = own
        return found

    def _tensors(self) -> list[shards.Tensor]:
        """Returns the published tensors, in the order of the weights."""
        order = {path: number for number, path in enumerate(self.mapping.specs)}
        items = sorted(
            self.mapping.pieces.items(),
            key=lambda item: (order[item[1][0].weight], item[1][0].index),
        )
        tensors: list[shards.Tensor] = []
        for name, pieces in items:
            if packer := self.packers.get(name):
                tensors += (*packer.made, *packer.kept)
            else:
                dtype = self._dtype(name, pieces[0])
                tensors.append(shards.Tensor(name, pieces[0].published_shape, dtype))
        return tensors

    def _dtype(self, name: str, piece: Piece) -> str:
        usual = _TYPES[self.mapping.specs[piece.weight].dtype]
        return self.record.dtypes.get(name, usual)


class _Values:
    """Makes published tensors from the weights of a checkpoint."""

    def __init__(self, source: ExportSource):
        # Imports TensorStore, which mistakes need not wait for.
        from lingvo_gshard.wings.open_models.streamed import WeightReader

        self._reader = WeightReader(source.directory, source.checkpoint, source.item)
        self._mapping = source.mapping
        self._specs = dict(source.specs.flatten_items())
        packers = source.packers.values()
        self._packers = {tensor.name: p for p in packers for tensor in (*p.made, *p.kept)}
        self._scale = source.params.task.lora.cls.scale(source.params.task.lora)

    def of(self, tensors: Sequence[shards.Tensor]) -> Iterator[np.ndarray]:
        """Yields the values of tensors, in order. Threads make several at a time."""
        pending: collections.deque[tuple[int, concurrent.futures.Future]] = collections.deque()
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            # Neighbors that one packer makes are made together.
            for _, group in itertools.groupby(tensors, lambda t: self._packers.get(t.name, t)):
                together = list(group)
                size = sum(tensor.nbytes for tensor in together)
                while pending and sum(n for n, _ in pending) + size > _BYTES_AT_ONCE:
                    yield from pending.popleft()[1].result()
                pending.append((size, pool.submit(self._values, together)))
            while pending:
                yield from pending.popleft()[1].result()

    def _values(self, tensors: list[shards.Tensor]) -> list[np.ndarray]:
        """Returns the values of a tensor, or of several that one packer makes."""
        first = tensors[0]
        if packer := self._packers.get(first.name):
            return packer.values([tensor.name for tensor in tensors], self._unpacked)
        return [self._unpacked(first.name).astype(shards.dtype_of(first.dtype), copy=False)]

    def _unpacked(self, name: str) -> np.ndarray:
        """Returns a published tensor in the type of its weights."""
        pieces = self._mapping.pieces[name]
        shape = pieces[0].published_shape
        dtype = np.dtype(self._mapping.specs[pieces[0].weight].dtype)
        published = np.zeros(shape, dtype) if len(pieces) > 1 else np.empty(shape, dtype)
        for piece in pieces:
            piece.rearrangement.invert(self._merged(piece), published, piece.sizes)
        return published

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


ADAPTER_CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _SUFFIX = "base_model.model.", ".weight"
_INSTEAD = "`format=huggingface` writes a whole model, with merged weights"


@dataclasses.dataclass(frozen=True)
class PublishedAdapter:
    """The adapters of a checkpoint.

    Attributes:
      source: the checkpoint.
      lora: Params of the adapters.
      layers: names of the published layers that have adapters.
      factors: each published factor, with its place in theta.
    """

    source: ExportSource
    lora: Params
    layers: tuple[str, ...]
    factors: tuple[tuple[shards.Tensor, Piece], ...]

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
        return sum(tensor.nbytes for tensor, _ in self.factors)

    def write(self, directory: pathlib.Path) -> None:
        """Writes the files of peft.

        Args:
          directory: an empty directory.

        Raises:
          OSError: a file cannot be written.
          UserError: the checkpoint is damaged.
        """
        text = msgspec.json.format(msgspec.json.encode(self._config()), indent=1)
        (directory / ADAPTER_CONFIG_FILE).write_bytes(text)
        file = directory / WEIGHTS_FILE
        tensors = [shards.Published(t.name, t.shape, t.dtype, file) for t, _ in self.factors]
        shards.write_file(tensors, self._values())

    def _values(self) -> Iterator[np.ndarray]:
        # Imports TensorStore, which mistakes need not wait for.
        from lingvo_gshard.wings.open_models.streamed import WeightReader

        source = self.source
        reader = WeightReader(source.directory, source.checkpoint, source.item)
        for tensor, piece in self.factors:
            published = np.zeros(tensor.shape, np.float32)
            part = reader.read(piece.weight, piece.index)
            piece.rearrangement.invert(part, published, piece.sizes)
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


def _factors_of_piece(
    source: ExportSource, name: str, piece: Piece
) -> list[tuple[shards.Tensor, Piece]]:
    """Returns the adapter's factors of the weight in a published tensor; none without an adapter.

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
        factor = Piece(path, piece.index, rearrangement, sizes)
        factors.append((shards.Tensor(full, factor.published_shape, "F32"), factor))
    return factors
