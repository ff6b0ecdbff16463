"""WeightMapping: for the weights of one model, which published tensors each is made of."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping

from lingvo_gshard.core import NestedMap, UserError, VariableSpec
from lingvo_gshard.wings.open_models.table import EXPERT, LAYER, Rearrangement, Table, TensorPattern

_LAYER_PATH = re.compile(r"(?P<stack>\w+)\.(?P<layer>(?:first_layers|layers)\[(?P<index>\d+)\])\.")


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a weight that one published tensor holds.

    Attributes:
      weight: dotted path of the weight in theta.
      index: where in the weight the part is: indices of its first dimensions.
      rearrangement: turns the dimensions of the tensor into the dimensions of the part.
      sizes: size of each letter of the part.
    """

    weight: str
    index: tuple[int, ...]
    rearrangement: Rearrangement
    sizes: Mapping[str, int]

    @property
    def published_shape(self) -> tuple[int, ...]:
        """The shape of the published tensor."""
        return self.rearrangement.published_shape(self.sizes)


@dataclasses.dataclass(frozen=True)
class WeightMapping:
    """The weights that the published tensors of a model become.

    Attributes:
      pieces: published name -> the parts of weights that the tensor holds, mostly one.
      specs: path -> VariableSpec of each weight.
    """

    pieces: Mapping[str, tuple[Piece, ...]]
    specs: Mapping[str, VariableSpec]

    @classmethod
    def of(cls, table: Table, specs: NestedMap) -> WeightMapping:
        """Returns the mapping of a model.

        Args:
          table: the family's table.
          specs: the tree of the model's VariableSpec.

        Raises:
          UserError: the table lacks a weight of the model.
        """
        by_path = dict(specs.flatten_items())
        names = {
            name: where for path, spec in by_path.items() for name, where in _names(path, spec)
        }
        layers = _layer_paths(names)
        found: dict[str, list[tuple[TensorPattern, Piece]]] = {}
        for row in table:
            for published, piece in _expand(row, layers, names, by_path):
                found.setdefault(published, []).append((row, piece))
        pieces = {name: _joined(parts) for name, parts in found.items()}
        mapping = cls(pieces, by_path)
        mapping._check_complete()
        return mapping

    def of_weights(self) -> dict[str, list[tuple[Piece, str]]]:
        """Returns, for each weight, its parts in order with the names of their tensors."""
        found: dict[str, list[tuple[Piece, str]]] = {path: [] for path in self.specs}
        for published, pieces in self.pieces.items():
            for piece in pieces:
                found[piece.weight].append((piece, published))
        for parts in found.values():
            parts.sort(key=lambda part: part[0].index)
        return found

    def _check_complete(self) -> None:
        for path, parts in self.of_weights().items():
            shape = self.specs[path].shape
            depth = len(parts[0][0].index) if parts else 0
            if len(parts) != math.prod(shape[:depth]):
                raise UserError(f"the family's table places no tensor in all of the weight {path}")


def _names(path: str, spec: VariableSpec) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yields the name of each layer's weight, with the array and the index that hold it."""
    if not spec.slices:
        yield spec.path, (path, ())
        return
    indices = itertools.product(*map(range, spec.shape[: spec.stacked]))
    for name, index in zip(spec.slices, indices, strict=True):
        yield name, (path, index)


def _layer_paths(names: Mapping[str, object]) -> dict[str, list[str]]:
    """Returns the paths of each stack's layers, relative to the stack and in running order."""
    found: dict[str, dict[str, int]] = {}
    for match in filter(None, map(_LAYER_PATH.match, names)):
        found.setdefault(match["stack"], {})[match["layer"]] = int(match["index"])
    return {
        stack: sorted(layers, key=lambda path: ("first_layers" not in path, layers[path]))
        for stack, layers in found.items()
    }


def _expand(
    row: TensorPattern,
    layers: Mapping[str, list[str]],
    names: Mapping[str, tuple[str, tuple[int, ...]]],
    specs: Mapping[str, VariableSpec],
) -> Iterator[tuple[str, Piece]]:
    """Yields the published names that a row stands for, each with what it holds."""
    stack = row.weight.partition(".")[0]
    numbered = list(enumerate(layers.get(stack, []))) if LAYER in row.weight else [(0, "")]
    for number, layer in numbered:
        name = row.weight.replace(LAYER, layer)
        if name not in names or not _applies(row, layer, names):
            continue
        path, index = names[name]
        spec, published = specs[path], row.published.replace(LAYER, str(number))
        inner = spec.layout[len(index) + (EXPERT in published) :]
        if row.rearrangement.layout != inner:
            # Another row has the tensor for a weight of this layout.
            continue
        if EXPERT not in published:
            yield published, _piece(row, path, spec, index)
            continue
        for expert in range(spec.shape[len(index)]):
            piece = _piece(row, path, spec, (*index, expert))
            yield published.replace(EXPERT, str(expert)), piece


def _applies(row: TensorPattern, layer: str, names: Mapping[str, object]) -> bool:
    """Returns whether the model has the other weights that a row depends on."""
    if row.beside and row.beside.replace(LAYER, layer) not in names:
        return False
    return not row.not_beside or row.not_beside.replace(LAYER, layer) not in names


def _piece(row: TensorPattern, path: str, spec: VariableSpec, index: tuple[int, ...]) -> Piece:
    layout, shape = spec.layout[len(index) :], spec.shape[len(index) :]
    return Piece(path, index, row.rearrangement, dict(zip(layout, shape, strict=True)))


def _joined(parts: list[tuple[TensorPattern, Piece]]) -> tuple[Piece, ...]:
    """Returns the pieces of a tensor, those that are joined with their places in it."""
    extents = [
        piece.rearrangement.extent(row.joined, piece.sizes) if row.joined else 0
        for row, piece in parts
    ]
    pieces, start = [], 0
    for (row, piece), extent in zip(parts, extents, strict=True):
        if row.joined:
            placed = piece.rearrangement.joined_at(row.joined, start, sum(extents))
            piece = dataclasses.replace(piece, rearrangement=placed)
            start += extent
        pieces.append(piece)
    return tuple(pieces)
