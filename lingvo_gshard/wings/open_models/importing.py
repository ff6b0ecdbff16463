"""Imports a published model: writes a run from it, tensor by tensor."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from lingvo_gshard.core import (
    NestedMap,
    Params,
    UserError,
    atomic,
    called_before_abrupt_end,
    explained,
    is_bucket,
    objects,
    stores,
    tf,
)
from lingvo_gshard.training import Logdir, precision
from lingvo_gshard.wings.fine_tuning.adapters import is_factor, without_factors
from lingvo_gshard.wings.fine_tuning.preferences import without_reference
from lingvo_gshard.wings.open_models import shards
from lingvo_gshard.wings.open_models.config import CONFIG_FILE, PublishedConfig
from lingvo_gshard.wings.open_models.families import Family, family_of
from lingvo_gshard.wings.open_models.fused import split_experts
from lingvo_gshard.wings.open_models.packed import FP8, BlockScaled, PackedSource, unpack
from lingvo_gshard.wings.open_models.weight_mapping import Piece, WeightMapping
from lingvo_gshard.wings.open_models.wrappers import text_name
from lingvo_gshard.wings.preparation.vocabularies.published_vocabulary import (
    RECORD_FILE,
    SCALES_FILE,
    copy_files,
)

if TYPE_CHECKING:
    from lingvo_gshard.wings.open_models import streamed


@dataclasses.dataclass(frozen=True)
class Import:
    """The run that an import wrote.

    Attributes:
      logdir: the directory of the run.
      experiment: name of the experiment.
      tensors: number of tensors read.
      parameters: number of weights.
      bytes: size of the tensors read.
      left_out: number of tensors that the run has no weights for, such as tensors of layers that
        predict further tokens.
    """

    logdir: str
    experiment: str
    tensors: int
    parameters: int
    bytes: int
    left_out: int


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """A published model whose tensors were found and fit its config.

    Attributes:
      directory: its files.
      config: its config, of the language model alone if there are other parts.
      family: the family of its architecture.
      params: its experiment.
      tensors: name -> its tensor.
      mapping: where the tensors go.
    """

    directory: pathlib.Path
    config: PublishedConfig
    family: Family
    params: Params
    tensors: dict[str, shards.Source]
    mapping: WeightMapping

    @classmethod
    def open(cls, directory: str | os.PathLike, params: Params) -> PublishedModel:
        """Reads the headers of a published model, and checks them.

        Args:
          directory: the files.
          params: the model's experiment, as `experiment_of` returns it, or with other settings.

        Raises:
          UserError: files are missing, damaged, or do not fit the config.
        """
        if is_bucket(directory):
            raise UserError(
                f"{directory}: a published model is mapped into memory, so it must be on a local "
                "disk. Copy it there first, as with `gcloud storage cp -r` or `aws s3 cp "
                "--recursive`"
            )
        source = pathlib.Path(directory)
        config = PublishedConfig.load(source)
        family = family_of(config)
        left_out = family.left_out(config)
        raw = shards.read_headers(source)
        if config.is_part:
            raw, others = _text_tensors(raw)
            left_out = (*left_out, *others)
        tensors = unpack(raw, config.packing(), config.where)
        with explained(f"{source} does not fit the experiment; leave `experiment` out", UserError):
            specs = without_reference(without_factors(weight_specs(params)))
        mapping = WeightMapping.of(family.table, specs)
        shapes = {name: pieces[0].published_shape for name, pieces in mapping.pieces.items()}
        tensors = split_experts(tensors, shapes, os.fspath(source))
        tensors = by_published_names(tensors, shapes, family.keys.renamed)
        model = cls(source, config, family, params, tensors, mapping)
        model._accept_copies(shapes)
        shards.check_tensors(tensors, shapes, left_out, source)
        return model

    def _accept_copies(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Adds the copies of shared tables to the expected shapes.

        Raises:
          UserError: a tensor that should be a copy differs from the table.
        """
        tensors = self.tensors
        for name, candidates in self.family.keys.copies.items():
            own = next(filter(shapes.__contains__, candidates), None)
            if name in shapes and own in tensors and own == "shared.weight":
                # Classes of T5 tie the softmax of a file that lacks one, whatever its config says.
                tensors.setdefault(name, tensors[own])
            if name in shapes or name not in tensors or own is None:
                continue
            # Some files have a shared table only under the name of a copy.
            copy, table = tensors[name], tensors.setdefault(own, tensors[name])
            if copy.shape != table.shape or not np.array_equal(copy.read(), table.read()):
                raise UserError(
                    f"{self.directory}: config.json says that tables are shared "
                    f"(tie_word_embeddings), but {name} differs from {own}"
                )
            shapes[name] = shapes[own]

    def parts(self, path: str) -> list[streamed.Part]:
        """Returns the parts of a weight, one for each published tensor that holds one."""
        from lingvo_gshard.wings.open_models import streamed

        found = []
        for piece, name in self._by_weight[path]:
            shape = self.mapping.specs[path].shape[len(piece.index) :]
            tensor = self.tensors[name]
            read = functools.partial(_read, piece, tensor)
            found.append(streamed.Part(piece.index, shape, tensor.nbytes, read))
        return found

    def pieces(self, path: str) -> list[tuple[Piece, str]]:
        """Returns the parts of a weight, each with the name of the tensor that holds it."""
        return self._by_weight[path]

    @functools.cached_property
    def _by_weight(self) -> Mapping[str, list[tuple[Piece, str]]]:
        return self.mapping.of_weights()

    @property
    def nbytes(self) -> int:
        """The size of the weights as the run stores them."""
        return sum(
            math.prod(spec.shape) * np.dtype(spec.dtype).itemsize
            for spec in self.mapping.specs.values()
        )

    def record(self) -> PublishedRecord:
        """Returns what a later export must know of the published tensors."""
        names = [name for name in self.mapping.pieces if name in self.tensors]
        packed = self._packed()
        blocks = [tensor.block for tensor in packed if isinstance(tensor, BlockScaled)]
        return PublishedRecord(
            model_type=self.family.model_type,
            dtypes={name: self.tensors[name].dtype for name in names},
            block=blocks[0] if blocks else None,
            in_4_bits=tuple(tensor.name for tensor in packed if tensor.dtype != FP8),
        )

    def write_extras(self, directory: pathlib.Path) -> None:
        """Writes the tokenizer's files, and what a later export must know of the tensors."""
        copy_files(self.directory, directory)
        if self.config.is_part:
            write_config(self.config.values, directory)
        (directory / RECORD_FILE).write_bytes(msgspec.json.encode(self.record()))
        scales = {each.name: each for tensor in self._packed() for each in tensor.kept}
        if scales:
            file, ordered = directory / SCALES_FILE, shards.by_alignment(list(scales.values()))
            written = [shards.Published(s.name, s.shape, s.dtype, file) for s in ordered]
            shards.write_file(written, (scales[tensor.name].read() for tensor in written))

    def _packed(self) -> list[PackedSource]:
        """Returns the tensors that are published with scales, without those that are left out."""
        found = (self.tensors.get(name) for name in self.mapping.pieces)
        return [tensor for tensor in found if isinstance(tensor, PackedSource)]


def by_published_names(
    tensors: Mapping[str, Any], wanted: Container[str], renamed: Mapping[str, str]
) -> dict[str, Any]:
    """Returns tensors by wanted names, where transformers writes others; see `Keys.renamed`."""
    found = {}
    for name, tensor in tensors.items():
        names = (name, *(name.replace(part, own) for part, own in renamed.items()))
        chosen = next((each for each in names if each in wanted), name)
        found[chosen] = dataclasses.replace(tensor, name=chosen)
    return found


def _text_tensors(
    tensors: Mapping[str, shards.Published],
) -> tuple[dict[str, shards.Published], tuple[str, ...]]:
    """Returns tensors by their names in a language model, and the names that it does not have."""
    found, others = {}, []
    for name, tensor in tensors.items():
        ours = text_name(name)
        if ours is None:
            others.append(name)
        found[ours or name] = dataclasses.replace(tensor, name=ours or name)
    return found, tuple(others)


def write_config(values: Mapping[str, Any], directory: pathlib.Path) -> None:
    """Writes the values of a `config.json`."""
    text = json.dumps(values, indent=2, ensure_ascii=False)
    (directory / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def weight_specs(params: Params) -> NestedMap:
    """Returns the tree of VariableSpec of an experiment's task, in the types of its precision."""
    return precision.get(params.step.precision).typed(params.task).instantiate().variable_specs()


def _initial_factors(params: Params) -> dict[str, np.ndarray]:
    """Returns the initial factors of the adapters of an experiment's task, by path."""
    if not params.task.lora.rank:
        return {}
    seed = tf.constant([params.step.seed & 0x7FFFFFFF, 0], tf.int32)
    items = weight_specs(params).flatten_items()
    return {path: spec.init(seed).numpy() for path, spec in items if is_factor(path)}


def import_model(source: str | os.PathLike, logdir: str | os.PathLike, params: Params) -> Import:
    """Writes a run of a published model. Memory is bounded by the largest tensor.

    Args:
      source: directory of the published model.
      logdir: directory of the new run.
      params: the experiment, as `experiment_of` returns it, or with other settings.

    Raises:
      UserError: files are missing, damaged, or do not fit the config; or the directory exists.
      OSError: the disk is full.
    """
    check_logdir(logdir)
    model = PublishedModel.open(source, params)
    # A tokenizer that cannot be read is reported before anything is written.
    params.input.instantiate().load_vocabularies(model.directory)
    params = params.copy().locate()
    target = Logdir(logdir)
    if not is_bucket(logdir):
        _check_space(target.path, model.nbytes)
    remove = functools.partial(objects.remove_tree, target.place)
    with target.claim(params), called_before_abrupt_end(remove):
        try:
            _write(model, target, params)
        except BaseException:
            remove()
            raise
    tensors = [model.tensors[name] for name in model.record().dtypes]
    return Import(
        logdir=os.fspath(logdir),
        experiment=params.name,
        tensors=len(tensors),
        parameters=sum(math.prod(spec.shape) for spec in model.mapping.specs.values()),
        bytes=sum(tensor.nbytes for tensor in tensors),
        left_out=len(model.tensors) - len(tensors),
    )


def check_logdir(logdir: str | os.PathLike) -> None:
    """Raises ValueError if the directory of a new run exists and is not empty."""
    path = stores.path_of(logdir)
    is_folder = is_bucket(path) or path.is_dir()
    if objects.names(path) if is_folder else path.exists():
        raise UserError(f"`logdir={logdir}` exists already; give the name of a new directory")


def _write(model: PublishedModel, target: Logdir, params: Params) -> None:
    # Imports Orbax, which mistakes need not wait for.
    from lingvo_gshard.wings.open_models import streamed

    theta = {
        path: streamed.StreamedArray(spec.shape, np.dtype(spec.dtype), model.parts(path))
        for path, spec in model.mapping.specs.items()
    }
    for path, value in _initial_factors(params).items():
        part = streamed.Part((), value.shape, value.nbytes, lambda value=value: value)
        theta[path] = streamed.StreamedArray(value.shape, value.dtype, [part])
    streamed.write_checkpoint(target.checkpoints, theta, params.to_text(), model.write_extras)


def _read(piece: Piece, tensor: shards.Source) -> np.ndarray:
    """Returns the part of a weight that a published tensor holds."""
    return piece.rearrangement.apply(tensor.read(), piece.sizes)


def _check_space(logdir: pathlib.Path, needed: int) -> None:
    parent = next(path for path in logdir.parents if path.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise UserError(
            f"`logdir={logdir}` cannot be written: {needed / 1e6:,.0f} MB needed, "
            f"{free / 1e6:,.0f} MB free"
        )


class PublishedRecord(msgspec.Struct, frozen=True):
    """The content of published.json.

    Attributes:
      model_type: name of the family.
      dtypes: name of each tensor -> its published type.
      block: rows and columns of a block of the tensors in FP8; None if there are none. The scales
        of the blocks are in SCALES_FILE.
      in_4_bits: names of the tensors in MXFP4 or NVFP4. Their small tensors are in SCALES_FILE.
    """

    model_type: str
    dtypes: dict[str, str]
    block: tuple[int, int] | None = None
    in_4_bits: tuple[str, ...] = ()


def read_record(directory: pathlib.Path) -> PublishedRecord | None:
    """Returns the record in a directory of a checkpoint; None for a run that was not imported."""
    try:
        return atomic.decode(objects.read_bytes(directory / RECORD_FILE), PublishedRecord)
    except FileNotFoundError:
        return None
