"""The table of a family: which published tensor holds which weight, as data."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from lingvo_gshard.wings.open_models.transposing import copy

# Returns the part of a tensor within (start, stop) of each dimension.
ReadBox = Callable[[Sequence[tuple[int, int]]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Rearrangement:
    """Splits and permutes the dimensions of a published tensor to the dimensions of a weight.

    In "(ND)M->MND", the published tensor has two dimensions: N and D merged into one, then M. The
    weight has three dimensions. A letter that stands only before the arrow numbers parts of the
    tensor, as `g` in "EM(Hg)->EMH". Each part is a weight of its own; `choose` selects one part.

    Attributes:
      text: both sides, with an arrow between them.
      choose: (letter, index, number of parts) for the letters that stand only before the arrow.
      joined: (letter, start, size), if the weight is only a part of the tensor. If the letter is
        the first of a published dimension, this dimension has `size` elements, and the weight
        begins at the element `start`. Otherwise the letter has `size` indices.
    """

    text: str
    choose: tuple[tuple[str, int, int], ...] = ()
    joined: tuple[str, int, int] | None = None

    @functools.cached_property
    def _groups(self) -> list[str]:
        """The letters of each published dimension."""
        return [a or b for a, b in re.findall(r"\((\w+)\)|(\w)", self.text.partition("->")[0])]

    @property
    def layout(self) -> str:
        """The letters of the weight."""
        return self.text.partition("->")[2]

    def published_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape of the published tensor.

        Args:
          sizes: size of each letter of the weight.
        """
        sizes = self._published_sizes(sizes)
        shape = [math.prod(sizes[letter] for letter in group) for group in self._groups]
        if self.joined and self._axis is not None:
            shape[self._axis] = self.joined[2]
        return tuple(shape)

    def extent(self, letter: str, sizes: Mapping[str, int]) -> int:
        """Returns what the weight takes of a tensor that is `joined` along a letter.

        Args:
          sizes: size of each letter of the weight.
        """
        group = next((group for group in self._groups if group[0] == letter), letter)
        return math.prod(sizes.get(each, 1) for each in group)

    def joined_at(self, letter: str, start: int, size: int) -> Rearrangement:
        """Returns the rearrangement of a weight at its place in a tensor; see `joined`."""
        place = (letter, start, size)
        if letter in self.layout:
            return dataclasses.replace(self, joined=place)
        return dataclasses.replace(self, choose=(*self.choose, place))

    def apply(self, published: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Returns the weight that a published tensor holds; a view where possible.

        Args:
          published: the tensor.
          sizes: size of each letter of the weight.
        """
        whole = {letter: (0, size) for letter, size in sizes.items()}
        return self.read_part(
            lambda box: published[tuple(slice(*part) for part in box)], sizes, whole
        )

    def read_part(
        self, read: ReadBox, sizes: Mapping[str, int], wanted: Mapping[str, tuple[int, int]]
    ) -> np.ndarray:
        """Reads a part of the weight, and no more of the tensor than this part needs.

        Args:
          read: returns the part of the tensor that lies within (start, stop) of each dimension.
          sizes: size of each letter of the weight.
          wanted: (start, stop) of each letter of the weight.
        """
        full, ranges = self._published_sizes(sizes), dict(wanted)
        ranges |= {letter: (index, index + 1) for letter, index, _ in self.choose}
        if self.joined and self._axis is None:
            letter, first, _ = self.joined
            start, stop = ranges[letter]
            ranges[letter] = (first + start, first + stop)
        box, shape, index = [], [], []
        for first, *rest in self._groups:
            inner = math.prod(full[letter] for letter in rest)
            start, stop = ranges[first]
            box.append((start * inner, stop * inner))
            shape += [stop - start, *(full[letter] for letter in rest)]
            index += [slice(None), *(slice(*ranges[letter]) for letter in rest)]
        if self.joined and self._axis is not None:
            start, stop = box[self._axis]
            box[self._axis] = (self.joined[1] + start, self.joined[1] + stop)
        part = read(box).reshape(shape)[tuple(index)]
        letters, kept = "".join(self._groups), self._left()
        part = part[tuple(slice(None) if letter in kept else 0 for letter in letters)]
        return part.transpose([kept.index(letter) for letter in self.layout])

    def invert(self, weight: np.ndarray, published: np.ndarray, sizes: Mapping[str, int]) -> None:
        """Writes a weight into the published tensor that holds it.

        Args:
          published: the tensor, contiguous; written in place.
          sizes: size of each letter of the weight.
        """
        # Both are read in the order of the tensor's own dimensions.
        order = [self.layout.index(letter) for letter in self._left()]
        copy(weight.transpose(order), self.apply(published, sizes).transpose(order))

    def of_factors(self, inputs: str, rank: str) -> tuple[Rearrangement, Rearrangement] | None:
        """Returns how the factors A and B of an adapter of this tensor are published.

        A linear layer is published as [output, input], its factors as A [rank, input] and
        B [output, rank].

        Args:
          inputs: letters of the weight that products sum over, in its order.
          rank: letter of the rank.

        Returns:
          None if the tensor is no matrix of one linear layer.
        """
        if self.choose or self.joined or len(self._groups) != 2:
            return None
        output, summed = self._groups
        if sorted(summed) != sorted(inputs):
            return None
        rest = "".join(letter for letter in self.layout if letter not in inputs)
        return (
            Rearrangement(f"{rank}({summed})->{inputs}{rank}"),
            Rearrangement(f"({output}){rank}->{rank}{rest}"),
        )

    @functools.cached_property
    def _axis(self) -> int | None:
        """The published dimension that begins with the joined letter; None if there is none."""
        firsts = [group[0] for group in self._groups]
        return firsts.index(self.joined[0]) if self.joined and self.joined[0] in firsts else None

    def _left(self) -> str:
        """Returns the letters before the arrow that the weight has, in their order."""
        chosen = {letter for letter, _, _ in self.choose}
        return "".join(letter for letter in "".join(self._groups) if letter not in chosen)

    def _published_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        is_inner = self._axis is None
        joined = {self.joined[0]: self.joined[2]} if self.joined and is_inner else {}
        return {**sizes, **{letter: parts for letter, _, parts in self.choose}, **joined}


LAYER, EXPERT = "{layer}", "{expert}"


class TensorPattern(msgspec.Struct, frozen=True, array_like=True):
    """One pattern of published names, a row of a table.

    Attributes:
      published: name of the tensor, such as "model.layers.{layer}.mlp.experts.{expert}.up_proj".
        {layer} counts the layers of a stack; {expert} the experts of a layer.
      weight: path of the weight, such as "decoder.{layer}.feed_forward.experts.w_in". {layer}
        stands for the path of the layer in its stack. A row applies to the layers that have the
        weight.
      arrangement: "<published letters>-><letters of the weight>". With {expert}, the letters
        describe the weight of one expert.
      joined: if several rows name the same tensor: the letter of the dimension that concatenates
        the rows' weights, in the order of the rows. Empty if the tensor holds one weight. The first
        letter of a published dimension stands for all of this dimension. A weight without the
        letter has one index of it.
      choose: for a tensor that holds several weights: see `Rearrangement.choose`.
      beside: path of a weight that the model must have for the row to apply; empty for none.
      not_beside: path of a weight that the model must not have for the row to apply.
    """

    published: str
    weight: str
    arrangement: str
    joined: str = ""
    choose: tuple[tuple[str, int, int], ...] = ()
    beside: str = ""
    not_beside: str = ""

    @property
    def rearrangement(self) -> Rearrangement:
        """The rearrangement from the tensor to the weight, if the tensor is not `joined`."""
        return Rearrangement(self.arrangement, self.choose)


Table = tuple[TensorPattern, ...]
