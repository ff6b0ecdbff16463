"""einsum over letters: the result's letters are its annotation."""

import math

import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.autodiff import remat_policy
from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.letters import check_layout
from lingvo_gshard.sharding import recording
from lingvo_gshard.sharding.annotate import annotate
from lingvo_gshard.sharding.partitioning import current_partitioning


def einsum(equation: str, *operands: tf.Tensor) -> tf.Tensor:
    """Returns tf.einsum(equation, *operands), annotated with the letters right of the arrow.

    Raises ValueError if a letter is unknown, has two sizes, or stands right of the arrow only, and
    if an operand's rank differs from its letters.
    """
    inputs, arrow, output = equation.partition("->")
    layouts = inputs.split(",")
    operands = tuple(map(tf.convert_to_tensor, operands))
    _check(equation, layouts, arrow, output, operands)
    if _is_product(layouts, output):
        kept = remat_policy.kept()
        known = kept.take(*layouts, output) if kept else None
        result = annotate(_product(*layouts, output, *operands, known), output)
        if kept:
            kept.add(*layouts, output, result)
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
        check_layout(layout, operand.shape.rank)
        for letter, size in zip(layout, operand.shape, strict=True):
            if size is not None and sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"einsum {equation!r}: {letter!r} has sizes {sizes[letter]} and {size}"
                )
    for letter in output:
        if letter not in "".join(layouts):
            raise ValueError(f"einsum {equation!r}: {letter!r} stands in no operand")


def _is_product(layouts: list[str], output: str) -> bool:
    """Whether it is one matrix product: every letter stands in two of the three tensors."""
    if len(layouts) != 2:
        return False
    letters = set("".join(layouts) + output)
    return all(sum(x in layout for layout in (*layouts, output)) >= 2 for x in letters)


def _product(
    left: str, right: str, output: str, x: tf.Tensor, y: tf.Tensor, known: tf.Tensor | None
) -> tf.Tensor:
    """The einsum of two operands; products in its gradients do not transpose the larger operand.

    known: the result, where it need not be computed, only differentiated.
    """

    @custom_gradient
    def compute(x: tf.Tensor, y: tf.Tensor):
        def gradient(dz: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return _contract(output, right, left, dz, y), _contract(output, left, right, dz, x)

        result = tf.einsum(f"{left},{right}->{output}", x, y) if known is None else known
        return result, gradient

    return compute(x, y)


def _contract(left: str, right: str, output: str, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """einsum that has no operand copied by XLA where it can be helped.

    In the gradient of a weight both operands begin with the contracted dimensions. XLA's product of
    matrices reads them in place, but of tensors with several such dimensions it first transposes
    one operand into a copy; so they are merged into one.
    """
    batch = "".join(letter for letter in left if letter in right and letter in output)
    contracted = "".join(letter for letter in left if letter in right and letter not in output)
    start = batch + contracted
    in_front = left.startswith(start) and right.startswith(start)
    if len(contracted) < 2 or not in_front or _are_split(left, contracted[1:]):
        return tf.einsum(f"{left},{right}->{output}", x, y)
    left_kept, right_kept = left[len(start) :], right[len(start) :]
    first, second = (_as_matrices(t, len(batch), len(contracted)) for t in (x, y))
    if output.endswith(left_kept):
        left_kept, right_kept, first, second = right_kept, left_kept, second, first
    sizes = dict(zip(left + right, (*x.shape, *y.shape), strict=True))
    result = tf.linalg.matmul(first, second, transpose_a=True)
    shape = [sizes[letter] for letter in batch + left_kept + right_kept]
    result = tf.reshape(result, shape)
    if batch + left_kept + right_kept != output:
        result = tf.einsum(f"{batch}{left_kept}{right_kept}->{output}", result)
    return result


def _are_split(layout: str, letters: str) -> bool:
    """Whether any of these dimensions is: a merged one whose minor part is split is in no order."""
    current = current_partitioning()
    if current is None:
        return False
    split = dict(zip(layout, current.split(layout, path=context.layer_path()), strict=True))
    return any(current.parts(split[letter]) > 1 for letter in letters)


def _as_matrices(x: tf.Tensor, batch: int, contracted: int) -> tf.Tensor:
    """Merges the contracted dimensions after the first `batch` ones, and all that follow them."""
    shape = x.shape.as_list()
    merged = math.prod(shape[batch : batch + contracted])
    return tf.reshape(x, [*shape[:batch], merged, math.prod(shape[batch + contracted :])])
