"""einsum whose result is annotated with the letters of the equation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol, TypeAlias

from lingvo_gshard.core import context, custom_gradient, known_sizes, tf
from lingvo_gshard.core.letters import check_layout
from lingvo_gshard.sharding import recording
from lingvo_gshard.sharding.annotate import annotate
from lingvo_gshard.sharding.partitioning import axes_of, parts_of


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Values of 8 bits with a scale for each block of them.

    Attributes:
      values: The values, in the type of the activations.
      scales: Float32, with the rank of the values; a dimension has the number of its blocks.
      size: Elements of a block along the dimensions that it extends over.
      dtype: Name of the type of 8 bits that has all the values.
    """

    values: tf.Tensor
    scales: tf.Tensor
    size: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Factor:
    """A factor of a matrix product: values times a scale.

    Attributes:
      values: The values, in the type of the activations.
      scale: Float32 scales that the result is multiplied by, with the rank of the values and size 1
        in the dimensions that the product sums over, or a scalar. None stands for 1.
      dtype: Name of a type of 8 bits that has all the values; empty if there is none.
      blocks: What the values are made of, if scales differ along a dimension that is summed.
    """

    values: tf.Tensor
    scale: tf.Tensor | None = None
    dtype: str = ""
    blocks: Blocks | None = None


# Letters that a product sums over -> a factor for this product.
FactorFor = Callable[[str], Factor]


class Rounding(Protocol):
    """Rounds the factors of matrix products, of the forward pass and of its gradient.

    Attributes:
      rounds_weight_gradients: Whether factors of the gradients of weights are rounded, too.
      by_rows: The same rounding with scales of single rows of activations and gradients, so that it
        does not matter which rows are computed together. Factors of the gradients of weights, which
        sum over rows, are not rounded.
    """

    @property
    def rounds_weight_gradients(self) -> bool: ...

    @property
    def by_rows(self) -> Rounding: ...

    def activation(self, x: tf.Tensor, layout: str) -> FactorFor:
        """Returns what rounds the first operand, given the letters that a product sums over."""
        ...

    def weight(self, x: tf.Tensor, layout: str, summed: str) -> FactorFor:
        """Returns what rounds the second operand, given the letters summed in the forward pass."""
        ...

    def gradient(self, x: tf.Tensor, layout: str) -> FactorFor:
        """Returns what rounds a result's gradient, given the letters that a product sums over."""
        ...

    def row_format(self, is_gradient: bool) -> tuple[str, int] | None:
        """Returns how kernels round rows; None if only operations can.

        It is the type of 8 bits, and the number of elements that share a scale; 0: a whole row.
        """
        ...

    def product(
        self, left: str, right: str, output: str, weight: str, first: Factor, second: Factor
    ) -> tf.Tensor | None:
        """Returns the product of two factors by a kernel; None if `einsum` computes it.

        Args:
          weight: The layout of the weight, or of its gradient: one of the three.
        """
        ...


def einsum(equation: str, *operands: tf.Tensor, rounding: Rounding | None = None) -> tf.Tensor:
    """Computes tf.einsum(equation, *operands) and annotates the result with its letters.

    In a remat unit, the result of a matrix product may be a saved one instead (see
    core/autodiff/remat_policy.py).

    Args:
      equation: Layouts of the operands, "->", and the layout of the result: "BLM,MH->BLH".
      *operands: One tensor for each layout left of the arrow.
      rounding: Rounds the factors of a matrix product of activations, first, with a weight; also
        the factors of the two products of its gradient. None computes with the operands as given.

    Raises:
      ValueError: A letter is unknown, has two sizes or stands right of the arrow only, or the rank
        of an operand differs from its layout.
    """
    inputs, arrow, output = equation.partition("->")
    layouts = inputs.split(",")
    operands = tuple(map(tf.convert_to_tensor, operands))
    _check(equation, layouts, arrow, output, operands)
    if _is_product(layouts, output):
        saved = context.current().saved_products
        (left, right), (x, y) = layouts, operands
        known = saved.restore(left, right, output) if saved else None
        result = annotate(_product(left, right, output, x, y, known, rounding), output)
        if saved:
            saved.save(left, right, output, result)
    else:
        result = annotate(tf.einsum(equation, *operands), output)
    recording.add(equation, operands, result)
    return result


def _check(
    equation: str, layouts: list[str], arrow: str, output: str, operands: tuple[tf.Tensor, ...]
) -> None:
    if not arrow:
        raise ValueError(f"einsum {equation!r} has no '->'")
    if len(layouts) != len(operands):
        raise ValueError(f"einsum {equation!r} takes {len(layouts)} operands, not {len(operands)}")
    sizes: dict[str, int] = {}
    for layout, operand in zip(layouts, operands, strict=True):
        check_layout(layout, operand.shape.rank, may_be_unnamed=False)
        for letter, size in zip(layout, operand.shape, strict=True):
            if size is not None and sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"einsum {equation!r}: {letter!r} has sizes {sizes[letter]} and {size}"
                )
    for letter in output:
        if letter not in "".join(layouts):
            raise ValueError(f"einsum {equation!r}: {letter!r} is in no operand")


def _is_product(layouts: list[str], output: str) -> bool:
    """Whether this is a matrix product: every letter is in at least two of the three tensors."""
    if len(layouts) != 2:
        return False
    letters = set("".join(layouts) + output)
    return all(sum(x in layout for layout in (*layouts, output)) >= 2 for x in letters)


def _product(
    left: str,
    right: str,
    output: str,
    x: tf.Tensor,
    y: tf.Tensor,
    known: tf.Tensor | None,
    rounding: Rounding | None,
) -> tf.Tensor:
    """Returns the einsum of two operands, with gradients that avoid transposing large operands.

    Args:
      left: Layout of `x`.
      right: Layout of `y`.
      known: The result, if it was saved and needs no computation.
      rounding: See `einsum`.
    """
    summed = summed_letters(left, right, output)
    of_x, of_y = summed_letters(output, right, left), summed_letters(output, left, right)

    @custom_gradient
    def compute(x: tf.Tensor, y: tf.Tensor):
        factor_x = rounding.activation(x, left) if rounding else lambda _: Factor(x)
        factor_y = rounding.weight(y, right, summed) if rounding else lambda _: Factor(y)

        def multiply(
            contract: _Contract, layouts: tuple[str, str, str], first: Factor, second: Factor
        ) -> tf.Tensor:
            """Returns the product of two factors: by a kernel, or of their values and scales."""
            found = rounding.product(*layouts, right, first, second) if rounding else None
            if found is not None:
                return found
            result = contract(*layouts, first.values, second.values)
            return _scaled(*layouts, result, first, second)

        def gradient(dz: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            factor_dz = rounding.gradient(dz, output) if rounding else lambda _: Factor(dz)
            layouts = output, right, left
            dx = multiply(_contract, layouts, factor_dz(of_x), factor_y(of_x))
            layouts = output, left, right
            if rounding and not rounding.rounds_weight_gradients:
                return dx, _weight_gradient(*layouts, dz, x)
            return dx, multiply(_weight_gradient, layouts, factor_dz(of_y), factor_x(of_y))

        if known is not None:
            return known, gradient
        layouts = left, right, output
        return multiply(_einsum, layouts, factor_x(summed), factor_y(summed)), gradient

    return compute(x, y)


# (left, right, output, x, y) -> the einsum of x and y.
_Contract: TypeAlias = "Callable[[str, str, str, tf.Tensor, tf.Tensor], tf.Tensor]"


def _einsum(left: str, right: str, output: str, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.einsum(f"{left},{right}->{output}", x, y)


def summed_letters(left: str, right: str, output: str) -> str:
    """Returns the letters that both operands have, in order of the first, and the result lacks."""
    return "".join(letter for letter in left if letter in right and letter not in output)


def _scaled(
    left: str, right: str, output: str, result: tf.Tensor, first: Factor, second: Factor
) -> tf.Tensor:
    """Returns the product of the values of two factors, times their scales."""
    if first.scale is None and second.scale is None:
        return result
    scaled = tf.cast(result, tf.float32)
    for layout, factor in ((left, first), (right, second)):
        if factor.scale is not None:
            scaled *= _broadcast(factor.scale, layout, output)
    return tf.cast(scaled, result.dtype)


def _broadcast(scale: tf.Tensor, layout: str, output: str) -> tf.Tensor:
    """Returns a factor's scales, shaped to be multiplied with the result of the product."""
    if scale.shape.rank == 0:
        return scale
    kept = [letter for letter in output if letter in layout]
    order = [layout.index(letter) for letter in kept]
    summed = [index for index in range(len(layout)) if index not in order]
    sizes = dict(zip(layout, known_sizes(scale.shape), strict=True))
    scale = tf.transpose(scale, [*order, *summed])
    return tf.reshape(scale, [sizes[letter] if letter in kept else 1 for letter in output])


def _contract(left: str, right: str, output: str, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns the einsum of two operands without a transposed copy of either, if possible.

    In the gradient of a weight both operands begin with the contracted dimensions. XLA contracts
    one leading dimension in place. With several it first transposes an operand into a copy, so this
    function merges them into one dimension.
    """
    batch = "".join(letter for letter in left if letter in right and letter in output)
    contracted = summed_letters(left, right, output)
    start = batch + contracted
    is_leading = left.startswith(start) and right.startswith(start)
    if len(contracted) < 2 or not is_leading or _are_split(left, contracted[1:]):
        return tf.einsum(f"{left},{right}->{output}", x, y)
    left_rest, right_rest = left[len(start) :], right[len(start) :]
    first, second = (_as_matrices(t, len(batch), len(contracted)) for t in (x, y))
    if output.endswith(left_rest):
        left_rest, right_rest, first, second = right_rest, left_rest, second, first
    sizes = dict(zip(left + right, (*x.shape, *y.shape), strict=True))
    result = tf.linalg.matmul(first, second, transpose_a=True)
    shape = [sizes[letter] for letter in batch + left_rest + right_rest]
    result = tf.reshape(result, shape)
    if batch + left_rest + right_rest != output:
        result = tf.einsum(f"{batch}{left_rest}{right_rest}->{output}", result)
    return result


def _weight_gradient(left: str, right: str, output: str, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns the einsum of two activations that is the gradient of a weight.

    Both are annotated: sums over the iterations of a loop (see wings/spmd_passes/loop_sums.py) must
    know how their terms are split. Nothing is summed over an axis that splits the result: under
    sequence parallelism, one axis splits positions of one operand and hidden units of the other,
    and the positions are gathered.
    """
    splits = [
        (letter, axes)
        for layout in (left, right)
        for letter, axes in zip(layout, axes_of(layout), strict=True)
    ]
    kept = {axis for letter, axes in splits if letter in output for axis in axes}
    conflicting = {letter for letter, axes in splits if letter not in output and kept & {*axes}}
    if any(axes for _, axes in splits):
        unsplit = "".join(sorted(conflicting))
        x, y = _annotated_factor(x, left, unsplit), _annotated_factor(y, right, unsplit)
    return _contract(left, right, output, x, y)


def _annotated_factor(x: tf.Tensor, layout: str, unsplit: str) -> tf.Tensor:
    """Returns a factor, annotated; one that was converted from 8 bits, before the conversion.

    XLA for TPUs finds products in 8 bits by the conversion right before them.
    """
    if not tf.executing_eagerly() and x.op.type == "Cast":
        narrow = x.op.inputs[0]
        if narrow.dtype.size < x.dtype.size:
            return tf.cast(annotate(narrow, layout, unsplit=unsplit), x.dtype)
    return annotate(x, layout, unsplit=unsplit)


def _are_split(layout: str, letters: str) -> bool:
    """Whether any of these dimensions is split.

    A split dimension cannot become the minor part of a merged one: its shards would interleave.
    """
    parts = dict(zip(layout, parts_of(layout), strict=True))
    return any(parts[letter] > 1 for letter in letters)


def _as_matrices(x: tf.Tensor, batch: int, contracted: int) -> tf.Tensor:
    """Reshapes to [*batch, contracted, rest]: merges the contracted and the remaining dimensions.

    Args:
      batch: Number of leading batch dimensions.
      contracted: Number of contracted dimensions after them.
    """
    shape = known_sizes(x.shape)
    merged = math.prod(shape[batch : batch + contracted])
    return tf.reshape(x, [*shape[:batch], merged, math.prod(shape[batch + contracted :])])
