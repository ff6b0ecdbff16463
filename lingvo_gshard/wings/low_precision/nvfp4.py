"""NVFP4: products of factors in 4 bits, as in "Pretraining Large Language Models with NVFP4".

NVIDIA 2025, arXiv 2509.25149. A factor has values of e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
negatives), a scale of e4m3 for each 16 of them along the sum, and a float32 scale of the tensor:

- In a weight, 16 x 16 values share a scale, so that both passes read the same weight.
- Gradients are rounded up or down by chance, so that the mean is the number.
- Both factors of a weight's gradient are transformed first: 16 neighbors along the sum are
  multiplied with a Hadamard matrix, whose rows have fixed random signs. That spreads outliers, and
  changes no exact product.
- Products of some layers stay in bfloat16.

Numbers beyond 6 times their scale are clipped. An infinity or a NaN spreads to its whole tensor.
Values times scales of e4m3 are exact in bfloat16, and the scale of the tensor multiplies the
result: a device without products in 4 bits computes the same sums as one with them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import numpy as np

from lingvo_gshard.core import context, known_sizes, random_numbers, tf
from lingvo_gshard.layers import Multiply, Product, ProductContext, ProductRule, TransformerStack
from lingvo_gshard.sharding import Blocks, Factor, FactorFor, Rounding
from lingvo_gshard.tasks import Task
from lingvo_gshard.wings.low_precision.block_products import BlockProduct
from lingvo_gshard.wings.low_precision.rounding import (
    BlockScales,
    EachProduct,
    in_blocks,
    largest_magnitude,
    last_of,
    magnitudes,
)

BLOCK, _DTYPE = 16, "float4_e2m1fn"
# Bits of the mantissa, the smallest number of full precision, and the largest one.
_VALUE, _SCALE = (1, 1.0, 6.0), (3, 2.0**-6, 448.0)
_LARGEST = _VALUE[2] * _SCALE[2]
_EXPONENT = 0x7F800000
_SIGNS = np.random.default_rng(2509).choice([-1.0, 1.0], [BLOCK, 1])
HADAMARD = (_SIGNS * functools.reduce(np.kron, [[[1, 1], [1, -1]]] * 4) / 4).astype(np.float32)


def rounded(
    x: tf.Tensor, number: tuple[int, float, float], chance: tf.Tensor | None = None
) -> tf.Tensor:
    """Returns float32 x rounded to a type such as `_VALUE`, and clipped to its largest number.

    `chance`, uniform in (0, 1), rounds up or down; None rounds to the nearest, ties to even.
    """
    bits, smallest, largest = number
    x = tf.clip_by_value(x, -largest, largest)
    power = tf.bitcast(tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), _EXPONENT), tf.float32)
    step = tf.maximum(power, smallest) * 2.0**-bits
    if chance is None:
        return tf.round(x / step) * step
    below = tf.floor(x / step)
    return (below + tf.cast(chance < x / step - below, tf.float32)) * step


def two_levels(
    x: tf.Tensor, axes: list[int], encode: tf.Tensor, dtype: tf.DType, key: tf.Tensor | None = None
) -> tuple[tf.Tensor, Blocks]:
    """Returns values times scales of e4m3, and both apart (the paper's appendix C).

    Args:
      axes: the dimensions that blocks of 16 extend over.
      encode: 1 over the float32 scale of the tensor.
      key: of the random numbers that round the values; None rounds to the nearest.
    """
    blocks, within, counts, whole = in_blocks(x, axes, BLOCK)
    largest = tf.reduce_max(magnitudes(blocks), within, keepdims=True)
    # XLA would replace a division by 6.
    scale = rounded(largest * (1 / 6.0) * encode, _SCALE)
    shape = known_sizes(blocks.shape)
    chance = None if key is None else random_numbers.hashed_uniform(shape, key)
    values = rounded(blocks * tf.math.divide_no_nan(1.0, scale * (1.0 / encode)), _VALUE, chance)
    apart = Blocks(tf.cast(whole(values), dtype), tf.reshape(scale, counts), BLOCK, _DTYPE)
    return tf.cast(whole(values * scale), dtype), apart


class WideLayers:
    """Knows the layers whose products stay in bfloat16: shares of the first and the last ones."""

    _paths: tuple[str, ...] = ()

    def __init__(self, first: float = 0.0, last: float = 0.0):
        self._first, self._last = first, last

    def choose(self, task: Task) -> None:
        """Chooses the layers of each stack of a task."""
        stacks = [layer for layer in task.all_layers() if isinstance(layer, TransformerStack)]
        self._paths = tuple(path for stack in stacks for path in self._of_stack(stack))

    def _of_stack(self, stack: TransformerStack) -> list[str]:
        alone, count = max(stack.p.dense_first, stack.p.sequential_first), stack.p.num_layers
        paths = [f"{stack.path}.first_layers[{i}]." for i in range(alone)]
        paths += [f"{stack.path}.layers[{i}]." for i in range(count - alone)]
        return paths[: round(self._first * count)] + paths[count - round(self._last * count) :]

    def has_current(self) -> bool | tf.Tensor:
        """Returns whether the products of the current layer stay in bfloat16.

        In a loop over layers that differ in this, it is a bool scalar of the iteration.
        """
        path, iteration = context.layer_path(), context.current().iteration
        paths = iteration.repetition.paths(path) if iteration else [path]
        found = [f"{each}.".startswith(self._paths) for each in paths]
        if iteration and len({*found}) > 1:
            return tf.gather(tf.constant(found), iteration.index)
        return found[0]


@dataclasses.dataclass(frozen=True)
class Nvfp4(EachProduct):
    """Rounds the factors of products to NVFP4; see the top of the file.

    Attributes:
      layers: the layers whose products are in bfloat16.
      key: of the random numbers that round gradients; None rounds them to the nearest.
      weight_letters: the layout of the weight. Both factors of a product that sums over other
        letters are transformed; empty: none are.
      is_wide: a bool scalar, whether the product is in bfloat16 in this iteration of a loop.
    """

    layers: WideLayers = dataclasses.field(default_factory=WideLayers)
    key: tf.Tensor | None = None
    weight_letters: str = ""
    is_wide: tf.Tensor | None = None
    rounds_weight_gradients: bool = dataclasses.field(default=True, init=False)

    @property
    def here(self) -> Rounding | None:
        """The rounding of the layer that computes; None in bfloat16."""
        wide = self.layers.has_current()
        if wide is True:
            return None
        return self if wide is False else dataclasses.replace(self, is_wide=wide)

    @property
    def by_rows(self) -> Rounding:
        """The rounding of dropless experts: grouped products have e4m3 in blocks of 128.

        None in bfloat16. In a loop with such layers and others, experts of all are rounded.
        """
        return cast(Any, self.here and BlockScales(rounds_weight_gradients=False))

    def _rounded(self, x: tf.Tensor, layout: str, summed: str, key: Any = None) -> Factor:
        axis, wide = layout.index(summed[-1]), x
        if self.weight_letters and summed[-1] not in self.weight_letters:
            missing = -known_sizes(x.shape)[axis] % BLOCK
            wide = tf.pad(x, [[0, missing * (each == axis)] for each in range(x.shape.rank)])
            x = _transformed(wide, axis)
        return self._factor(x, wide, [axis], key)

    def gradient(self, x: tf.Tensor, layout: str) -> FactorFor:
        def factor(summed: str) -> Factor:
            word, key = random_numbers.word(summed), self.key
            own = None if key is None else random_numbers.hashed_fold_in_word(key, word)
            return self._rounded(x, layout, summed, own)

        return factor

    def weight(self, x: tf.Tensor, layout: str, summed: str) -> FactorFor:
        others = "".join(letter for letter in layout if letter not in summed)
        axes = [last_of(layout, summed), last_of(layout, others)]
        found = self._factor(x, x, axes)

        def factor(summed: str) -> Factor:
            if found.blocks is None:
                return found
            # Kernels read a scale for each index of the other dimension.
            (axis,) = {*axes} - {layout.index(summed[-1])}
            rows = tf.range(known_sizes(x.shape)[axis]) // BLOCK
            scales = tf.gather(found.blocks.scales, rows, axis=axis)
            blocks = dataclasses.replace(found.blocks, scales=scales)
            return dataclasses.replace(found, blocks=blocks)

        return factor

    def _factor(
        self, x: tf.Tensor, wide: tf.Tensor, axes: list[int], key: tf.Tensor | None = None
    ) -> Factor:
        """Returns a tensor in 4 bits, or `wide` in bfloat16."""
        encode = _LARGEST / tf.maximum(largest_magnitude(x), _LARGEST * 2.0**-126)
        values, blocks = two_levels(x, axes, encode, wide.dtype, key)
        if self.is_wide is None:
            return Factor(values, 1.0 / encode, blocks=blocks)
        scale = tf.where(self.is_wide, 1.0, 1.0 / encode)
        return Factor(tf.where(self.is_wide, wide, values), scale)

    def product(
        self, left: str, right: str, output: str, weight: str, first: Factor, second: Factor
    ) -> tf.Tensor | None:
        """Returns the product by the platform's kernel, if it has one; see `einsum.Rounding`."""
        if first.blocks is None or first.scale is None or second.scale is None:
            return None
        found = BlockProduct(left, right, output, weight).compute(first, second)
        if found is None:
            return None
        return tf.cast(tf.cast(found, tf.float32) * first.scale * second.scale, found.dtype)


def _transformed(x: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns float32 x whose 16 neighbors along a dimension are multiplied with HADAMARD."""
    blocks, (within,), _, whole = in_blocks(x, [axis], BLOCK)
    letters = "abcdefghijklmnop"[: blocks.shape.rank]
    result = letters.replace(letters[within], "z")
    return whole(tf.einsum(f"{letters},{letters[within]}z->{result}", blocks, HADAMARD))


class EachKey(ProductRule):
    """Gives each product its random numbers, and leaves products of some layers in bfloat16."""

    def multiply(
        self, product: Product, x: tf.Tensor, weight: Any, multiply: Multiply
    ) -> tf.Tensor:
        """Returns a product in NVFP4, or in bfloat16."""
        rounding = context.extension(ProductContext).rounding
        if isinstance(rounding, Nvfp4):
            passing = context.current()
            path = f"{passing.layer_path}/{'+'.join(product.names)}/nvfp4"
            key = None if passing.seed is None else passing.random_seed(path)
            layout = product.equation.partition("->")[0].partition(",")[2]
            rounding = dataclasses.replace(rounding, key=key, weight_letters=layout).here
        with context.override_extension(ProductContext, rounding=rounding):
            return multiply(x, weight)

    def obstacle(self, theta: Any) -> str:
        """Returns "": kernels of dropless experts round rows without random numbers."""
        del theta
        return ""
