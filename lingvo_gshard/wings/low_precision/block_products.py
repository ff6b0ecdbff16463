"""Products of blocks with scales on a mesh, in a manual region around the platform's kernel.

XLA does not partition a kernel. Here each mesh axis splits one letter of the product: one of the
weight, if the axis splits any of these in the activations; else one of the activations. Factors
that are split otherwise are resharded where the region begins, in 8 bits. Devices along the axes of
a letter that is summed have parts of the sums.
"""

from __future__ import annotations

import dataclasses
import math
from typing import cast

from lingvo_gshard.core import context, kernel_use, known_sizes, tf
from lingvo_gshard.sharding import (
    Factor,
    collectives,
    current_partitioning,
    manual,
    mesh_in_use,
    resolve,
    summed_letters,
)
from lingvo_gshard.wings import kernels

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class BlockProduct:
    """A product of two factors in blocks along one letter.

    Attributes:
      weight: which of the three layouts the weight has, or its gradient.
    """

    left: str
    right: str
    output: str
    weight: str

    def compute(self, first: Factor, second: Factor) -> tf.Tensor | None:
        """Returns the product by the platform's kernel; None if einsum must compute it.

        Both factors have blocks along the last of the letters that are summed. Whether a layer uses
        the kernel, or why not, is recorded: see `kernel_use.recording`.
        """
        if not kernels.block_products.is_available():
            return None
        assert first.blocks is not None and second.blocks is not None
        axes = self._axes()
        sizes = self._sizes(first.values, second.values)
        obstacle = self._obstacle(axes, sizes, first.blocks.size)
        kernel_use.note(context.layer_path(), kernels.block_products.NAME, obstacle)
        if obstacle:
            return None
        dtype = first.blocks.dtype
        arrays = [first.blocks.values, second.blocks.values]
        arrays += [first.blocks.scales, second.blocks.scales]
        if not axes:
            return self._compute_part(dtype, *arrays)
        splits = [tuple(axes.get(x, ()) for x in layout) for layout in (self.left, self.right)]
        summed = [axis for letter in self._summed for axis in axes.get(letter, ())]
        scattered = self._scattered(axes, summed, sizes)

        def on_device(*shards: tf.Tensor) -> tf.Tensor:
            part = self._compute_part(dtype, *shards)
            for axis in summed:
                if axis in scattered:
                    dimension = self.output.index(scattered[axis])
                    part = collectives.reduce_scatter(part, (axis,), dimension)
            return collectives.psum(part, tuple(a for a in summed if a not in scattered))

        of_output = tuple(
            (*axes.get(x, ()), *(axis for axis in summed if scattered.get(axis) == x))
            for x in self.output
        )
        return cast(tf.Tensor, manual(on_device, splits * 2, of_output)(*arrays))

    @property
    def _summed(self) -> str:
        """The letters that are summed, in the order of the first factor; blocks are of the last."""
        return summed_letters(self.left, self.right, self.output)

    def _axes(self) -> dict[str, Axes]:
        """Returns the mesh axes that split each letter during the product."""
        if mesh_in_use() is None or current_partitioning() is None:
            # One device, or a manual region, whose tensors are shards.
            return {}
        letters: dict[str, list[str]] = {}
        for layout in (self.left, self.right, self.output):
            if layout != self.weight:
                for letter, axes in zip(layout, resolve(layout, len(layout)), strict=True):
                    for axis in axes:
                        letters.setdefault(axis, []).append(letter)
        found: dict[str, Axes] = {}
        for axis, candidates in letters.items():
            of_weight = [letter for letter in candidates if letter in self.weight]
            letter = (of_weight or candidates)[0]
            found[letter] = (*found.get(letter, ()), axis)
        return found

    def _scattered(
        self, axes: dict[str, Axes], summed: list[str], sizes: dict[str, int]
    ) -> dict[str, str]:
        """Returns axis -> letter of the result that it splits, for axes that sums are split over.

        Sums along them are scattered, where the letter is not split by another axis and divides.
        """
        partitioning = current_partitioning()
        assert partitioning is not None
        kind = "weights" if self.output == self.weight else "activations"
        split = partitioning.split(self.output, kind, context.layer_path())
        return {
            own[0]: letter
            for letter, own in zip(self.output, split, strict=True)
            if len(own) == 1 and own[0] in summed and not axes.get(letter)
            if sizes[letter] % partitioning.parts(own) == 0
        }

    def _sizes(self, left: tf.Tensor, right: tf.Tensor) -> dict[str, int]:
        """Returns the size of each letter, of arrays in the layouts of the factors."""
        of_left = zip(self.left, known_sizes(left.shape), strict=True)
        return dict(of_left) | dict(zip(self.right, known_sizes(right.shape), strict=True))

    def _obstacle(self, axes: dict[str, Axes], sizes: dict[str, int], block: int) -> str:
        """Returns why the kernel cannot compute the product; "" if it can."""
        mesh = mesh_in_use()
        for letter, size in sizes.items():
            parts = mesh.parts(axes.get(letter, ())) if mesh and axes else 1
            least = block if letter == self._summed[-1] else 1
            if size % (parts * least):
                where = f" on each of {parts} devices" if parts > 1 else ""
                whole = f"blocks of {least}" if least > 1 else "equal parts"
                return f"{letter} of {size} is not divided into {whole}{where}"
        return ""

    def _compute_part(
        self,
        dtype: str,
        left: tf.Tensor,
        right: tf.Tensor,
        left_scales: tf.Tensor,
        right_scales: tf.Tensor,
    ) -> tf.Tensor:
        """Returns one device's product, from values and scales in the layouts of the factors."""
        batch = "".join(x for x in self.left if x in self.right and x in self.output)
        of_left = "".join(x for x in self.output if x in self.left and x not in batch)
        of_right = "".join(x for x in self.output if x in self.right and x not in batch)
        factors = [
            (self.left, of_left, left, left_scales),
            (self.right, of_right, right, right_scales),
        ]
        if self.output.endswith(of_left):
            # Its letters come last, so that the result is not transposed.
            factors.reverse()
        matrices = [
            [_as_matrices(x, layout, (batch, own, self._summed)) for x in arrays]
            for layout, own, *arrays in factors
        ]
        (first, first_scales), (second, second_scales) = matrices
        product_GMN = kernels.block_products.product(
            dtype, first, second, first_scales, second_scales
        )
        sizes = self._sizes(left, right)
        found = batch + "".join(own for _, own, *_ in factors)
        product = tf.reshape(product_GMN, [sizes[letter] for letter in found])
        return tf.transpose(product, [found.index(letter) for letter in self.output])


def _as_matrices(array: tf.Tensor, layout: str, groups: tuple[str, str, str]) -> tf.Tensor:
    """Returns an array with its letters in the order of three groups, and a dimension for each."""
    order = [layout.index(letter) for letter in "".join(groups)]
    sizes = dict(zip(layout, known_sizes(array.shape), strict=True))
    shape = [math.prod(sizes[letter] for letter in group) for group in groups]
    return tf.reshape(tf.transpose(array, order), shape)
