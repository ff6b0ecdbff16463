"""Weights that are stored as int8 for decoding.

A weight stored as int8 is a NestedMap of its values and their `scale`, one for each output channel.
The weight is about values x scale. The name of the values says how they are multiplied:

  int8          int8 products with int32 sums. The activations are rounded to int8 as well, at
                every product, with one scale for each row (Dettmers et al. 2022, arXiv 2208.07339,
                section 2.1: vector-wise quantization).
  int8_weights  products in the type of the activations.

Scales are largest magnitudes / 127, and there is no zero point.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from lingvo_gshard.core import NestedMap, context, known_sizes, tf
from lingvo_gshard.layers import PRODUCT_RULES, Multiply, Product, ProductRule
from lingvo_gshard.sharding import annotate, einsum

INT8, INT8_WEIGHTS = "int8", "int8_weights"

# The largest int8 value in use. With -128 as well, the scale would be off center.
_LARGEST = 127
# A product with fewer weights takes longer in int8 than in float32: activations must be rounded.
# Under XLA for CPU, 32 rows took 27 µs for 20 with 256 x 256 weights, 87 for 103 with 256 x 1024.
SMALL = 2**18


@dataclasses.dataclass(frozen=True)
class StoredPrecision:
    """The extension of the context that says how weights are stored; empty for as they are."""

    name: str = ""


def store(weight: tf.Tensor, layout: str, contracted: str) -> tf.Tensor | NestedMap:
    """Returns a weight as products read it, with the precision of the context.

    Args:
      layout: its letters. Each expert, E, has a product of its own.
      contracted: the letters that products sum over. They are the first or the last of a product's.
    """
    precision = context.extension(StoredPrecision).name
    if not precision:
        return weight
    sizes = dict(zip(layout, known_sizes(weight.shape), strict=True))
    if math.prod(size for letter, size in sizes.items() if letter != "E") < SMALL:
        precision = INT8_WEIGHTS
    weight = tf.cast(weight, tf.float32)
    axes = [layout.index(letter) for letter in contracted]
    largest = tf.reduce_max(tf.abs(weight), axes, keepdims=True)
    values = tf.cast(tf.round(weight * _to_unit(largest)), tf.int8)
    values = annotate(values, layout, "weights")
    scale = annotate(largest / _LARGEST, layout, "weights", unsplit=contracted)
    return NestedMap({precision: values, "scale": scale})


def is_stored(weight: Any) -> bool:
    """Returns whether a weight is what `store` makes of one: int8 values and their scale."""
    return isinstance(weight, NestedMap) and (INT8 in weight or INT8_WEIGHTS in weight)


class _StoredWeights(ProductRule):
    """Multiplies with stored weights."""

    def multiply(
        self, product: Product, x: tf.Tensor, weight: Any, multiply: Multiply
    ) -> tf.Tensor:
        """Returns a product with a stored weight, or by the following rules with another."""
        if is_stored(weight):
            return _multiply_stored(product.equation, x, weight)
        return multiply(x, weight)

    def look_up(self, table: NestedMap, ids: tf.Tensor) -> tf.Tensor | None:
        """Returns float32 rows of a stored table, which has a scale for each row."""
        if not is_stored(table):
            return None
        return tf.cast(tf.gather(_values(table), ids), tf.float32) * tf.gather(table.scale, ids)

    def obstacle(self, theta: NestedMap) -> str:
        """Returns that a layer's weights are stored, if one of them is."""
        return "its weights are int8" if any(map(is_stored, theta.values())) else ""


PRODUCT_RULES.register("stored_weights")(_StoredWeights())


def _multiply_stored(equation: str, x: tf.Tensor, weight: NestedMap) -> tf.Tensor:
    """Returns the product of activations with what `store` returned for a weight."""
    inputs, _, output = equation.partition("->")
    left, right = inputs.split(",")
    sizes = dict(zip(right, known_sizes(_values(weight).shape), strict=True))
    scale = tf.reshape(weight.scale, [sizes[letter] for letter in right if letter in output])
    if INT8 in weight:
        y = annotate(_multiply_int8(left, right, output, x, weight[INT8]), output)
    else:
        y = tf.cast(einsum(equation, x, tf.cast(weight[INT8_WEIGHTS], x.dtype)), tf.float32)
    return tf.cast(y * scale, x.dtype)


def restore(weights: Any, only_small: bool = False) -> Any:
    """Returns a tree of weights with int8 weights converted back to float32.

    Args:
      weights: NestedMaps and lists of weights.
      only_small: converts only weights of fewer than SMALL elements. Larger int8 weights have fast
        products, or their conversion is slow.
    """
    if is_stored(weights):
        values = _values(weights)
        if only_small and math.prod(known_sizes(values.shape)) >= SMALL:
            return weights
        return tf.cast(values, tf.float32) * weights.scale
    if isinstance(weights, dict):
        return NestedMap({name: restore(each, only_small) for name, each in weights.items()})
    if isinstance(weights, (list, tuple)):
        return [restore(each, only_small) for each in weights]
    return weights


def _multiply_int8(
    left: str, right: str, output: str, x: tf.Tensor, weight: tf.Tensor
) -> tf.Tensor:
    """Returns the float32 product of x, whose rows are rounded to int8, and int8 values."""
    contracted = "".join(letter for letter in left if letter not in output)
    count = len(contracted)
    is_transposed = not right.startswith(contracted)
    is_matrix = left.endswith(contracted) and output.startswith(left[:-count])
    if not is_matrix or (is_transposed and not right.endswith(contracted)):
        raise ValueError(f"multiply {left},{right}->{output}: no product of matrices in this order")
    outer, inner = known_sizes(x.shape)[:-count], math.prod(known_sizes(x.shape)[-count:])
    columns = known_sizes(weight.shape)
    columns = columns[:-count] if is_transposed else columns[count:]
    x = tf.cast(tf.reshape(x, [math.prod(outer), inner]), tf.float32)
    largest = tf.reduce_max(tf.abs(x), -1, keepdims=True)
    shape = [math.prod(columns), inner] if is_transposed else [inner, math.prod(columns)]
    rounded = tf.cast(tf.round(x * _to_unit(largest)), tf.int8)
    sums = _integer_product(rounded, tf.reshape(weight, shape), is_transposed)
    return tf.reshape(tf.cast(sums, tf.float32) * (largest / _LARGEST), [*outer, *columns])


def _integer_product(x: tf.Tensor, weight: tf.Tensor, is_transposed: bool) -> tf.Tensor:
    """Returns the int32 product of two int8 matrices, the second transposed on demand."""
    rows = x.shape[0]
    if rows == 1:
        # XLA for CPU computes two rows several times as fast as one.
        x = tf.pad(x, [[0, 1], [0, 0]])
    return tf.matmul(x, weight, transpose_b=is_transposed, output_type=tf.int32)[:rows]


def _to_unit(largest: tf.Tensor) -> tf.Tensor:
    """Returns what numbers of at most this magnitude are multiplied by before they are rounded."""
    return tf.where(largest > 0, _LARGEST / largest, 0.0)


def _values(weight: NestedMap) -> tf.Tensor:
    """Returns the int8 values of a stored weight."""
    return weight[INT8] if INT8 in weight else weight[INT8_WEIGHTS]
