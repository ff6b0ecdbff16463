"""einsum over letters: the result's letters are its annotation."""

import math

import tensorflow as tf

from lingvo_gshard.sharding.annotate import annotate
from lingvo_gshard.sharding.letters import check_layout


def einsum(equation: str, *operands: tf.Tensor) -> tf.Tensor:
    """Returns tf.einsum(equation, *operands), annotated with the letters right of the arrow.

    Raises ValueError if a letter is unknown, has two sizes, or stands right of the arrow only, and
    if an operand's rank differs from its letters.
    """
    inputs, arrow, output = equation.partition("->")
    layouts = inputs.split(",")
    _check(equation, layouts, arrow, output, operands)
    if _is_product(layouts, output):
        result = _product(*layouts, output, *operands)
    else:
        result = tf.einsum(equation, *operands)
    return annotate(result, output)


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


def _product(left: str, right: str, output: str, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """The einsum of two operands; products in its gradients do not transpose the larger operand."""

    @tf.custom_gradient
    def compute(x: tf.Tensor, y: tf.Tensor):
        def gradient(dz: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return _contract(output, right, left, dz, y), _contract(output, left, right, dz, x)

        return tf.einsum(f"{left},{right}->{output}", x, y), gradient

    return compute(x, y)


def _contract(left: str, right: str, output: str, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """einsum with the operands in the order in which XLA transposes less.

    XLA's matrix product reads its left operand with the contracted dimensions last. Where both
    operands have them first, as in the gradient of a weight, the left one is copied into a
    transposed buffer, together with the elementwise operations before it: so that is the smaller.
    """
    kept = [x for x in left if x in output]
    contracts_leading = kept and left.endswith("".join(kept))
    if contracts_leading and math.prod(y.shape) < math.prod(x.shape):
        left, right, x, y = right, left, y, x
    return tf.einsum(f"{left},{right}->{output}", x, y)
