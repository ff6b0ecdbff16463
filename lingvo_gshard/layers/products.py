"""Products of activations with weights.

A layer multiplies by `product`, or by `joined_product` if it computes several products as one.
Features take part in all of them by rules; see product_rules.py. Without a rule, a product is an
einsum.

Training may round the factors of products; see `sharding.einsum.Rounding`. `unrounded` keeps the
products of sensitive layers, such as logits, in the type of their activations. Rows of
dropless experts are not computed together on every mesh: `rounded_by_rows` is for them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence

from lingvo_gshard.core import Layer, NestedMap, context, custom_gradient, tf
from lingvo_gshard.layers.product_rules import (
    PRODUCT_RULES,
    Product,
    ProductContext,
    ProductRule,
    current_rules,
)
from lingvo_gshard.sharding import annotate, einsum, parts_of


def unrounded() -> contextlib.AbstractContextManager[context.Context]:
    """Computes products inside a `with` block in the type of their activations.

    The rules of a precision take no part in them.
    """
    return context.override_extension(ProductContext, rounding=None, rules=())


def rounded_by_rows() -> contextlib.AbstractContextManager[context.Context]:
    """Rounds products inside a `with` block by scales of single rows; see `einsum.Rounding`."""
    rounding = context.extension(ProductContext).rounding
    return context.override_extension(ProductContext, rounding=rounding and rounding.by_rows)


def product(layer: Layer, theta: NestedMap, name: str, equation: str, x: tf.Tensor) -> tf.Tensor:
    """Returns the product of activations with a weight of a layer.

    Args:
      equation: see `multiply`.
    """
    y = multiply(equation, x, theta[name], theta, (name,))
    return _with_additions(Product(equation, theta, (name,), layer), x, y)


def joined_product(
    layer: Layer,
    theta: NestedMap,
    equations: Mapping[str, str],
    equation: str,
    x: tf.Tensor,
    weight: tf.Tensor | NestedMap,
    split: Callable[[tf.Tensor], Sequence[tf.Tensor]],
) -> list[tf.Tensor]:
    """Returns the products of activations with several weights of a layer, computed as one.

    The weights are rounded as one.

    Args:
      equations: name of each weight -> the equation of its own product.
      equation: the equation of the product with the joined weight.
      split: splits the product into one for each weight, in order.
    """
    parts = split(multiply(equation, x, weight, theta, tuple(equations)))
    return [
        _with_additions(Product(own, theta, (name,), layer), x, part)
        for (name, own), part in zip(equations.items(), parts, strict=True)
    ]


def multiply(
    equation: str,
    x: tf.Tensor,
    weight: tf.Tensor | NestedMap,
    theta: NestedMap | None = None,
    names: tuple[str, ...] = (),
) -> tf.Tensor:
    """Returns einsum(equation, x, weight) in the type of x, without what rules add.

    Args:
      equation: the contracted letters are the last of x and the first or the last of the weight;
        the other ones make the result, in order.
      weight: a weight, or what a rule has in its place.
      names: the names of the weights that `weight` is made of; none for a tied or frozen weight.
    """
    made_of = Product(equation, NestedMap() if theta is None else theta, names)
    return _follow(current_rules(), made_of, x, weight)


def _follow(
    rules: Sequence[ProductRule], of: Product, x: tf.Tensor, weight: tf.Tensor
) -> tf.Tensor:
    """Returns a product by rules. Each rule calls the next one."""
    if not rules:
        rounding = context.extension(ProductContext).rounding
        return einsum(of.equation, x, tf.cast(weight, x.dtype), rounding=rounding)
    first, *rest = rules
    return first.multiply(of, x, weight, functools.partial(_follow, rest, of))


def _with_additions(of: Product, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns the result y of one weight with what rules add to it."""
    for rule in current_rules():
        y = rule.add(of, x, y)
    return y


def factors(
    layer: Layer, theta: NestedMap, name: str, equation: str, x: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns activations and a weight whose plain einsum is `product(layer, theta, ...)`.

    They are for sensitive products that are computed in chunks.

    Args:
      name: name of the weight, a matrix whose first dimension the product sums over.
      equation: see `multiply`. The summed letter is the last of x.
    """
    weight = theta[name]
    for rule in PRODUCT_RULES:
        x, weight = rule.factors(Product(equation, theta, (name,), layer), x, weight)
    return x, weight


def obstacle(theta: NestedMap) -> str:
    """Returns why a layer's products must be computed by `product` alone; "" if they need not.

    A kernel, or code that splits a weight, asks first.

    Args:
      theta: the weights of the layer, or their specs.
    """
    return next(filter(None, (rule.obstacle(theta) for rule in current_rules())), "")


def whole_rows(table: tf.Tensor | NestedMap, layout: str) -> tf.Tensor | NestedMap:
    """Returns a table as `look_up` and `multiply` read it, in the type of the context.

    If the table is split along a row, this gathers it. XLA would look up parts of rows and then
    reshard them. The table is rounded before it is gathered. For that the rounded table is
    annotated like the table: else XLA splits it like its use, and gathers the table itself.

    Args:
      table: the table, or what a rule has in its place.
    """
    if isinstance(table, NestedMap):
        return table
    if dtype := table_dtype():
        table = annotate(tf.cast(table, dtype), layout, "weights")
    return annotate(table, layout)


def table_dtype() -> str:
    """Returns the type that rows of tables are rounded to in training; empty for the table's."""
    return context.extension(ProductContext).table_dtype


def look_up(table: tf.Tensor | NestedMap, ids: tf.Tensor) -> tf.Tensor:
    """Returns float32 rows of a table, with the dimensions of the ids before a row's dimensions.

    Args:
      table: [V,...], or what a rule has in its place.
      ids: integers in [0, V), of any shape.
    """
    if not isinstance(table, NestedMap):
        return lookup(table, ids)
    found = (rule.look_up(table, ids) for rule in PRODUCT_RULES)
    return next(rows for rows in found if rows is not None)


def lookup(table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Returns float32 rows of a table, with the dimensions of the ids before a row's dimensions.

    The gradient of a row is the sum over all its occurrences. The sum is computed in float32, even
    if the table has a narrower type. TensorFlow's own gradient would sum in the narrower type.

    Args:
      table: the table, [V,...].
      ids: integers in [0, V), of any shape.
    """
    if table.dtype == tf.float32 and not _has_split_positions(ids):
        return tf.gather(table, ids)

    @custom_gradient
    def compute(table: tf.Tensor):
        def gradient(d_rows: tf.Tensor) -> tf.Tensor:
            sums = tf.math.unsorted_segment_sum(d_rows, ids, table.shape[0])
            return tf.cast(sums, table.dtype)

        return tf.cast(tf.gather(table, ids), tf.float32), gradient

    return compute(table)


def _has_split_positions(ids: tf.Tensor) -> bool:
    """Returns whether L of ids [B,L] is split. TensorFlow's gradient would merge B and L."""
    return ids.shape.rank == 2 and parts_of("BL")[1] > 1


def add_bias(x: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """Returns x + bias in the type of x.

    The sum is computed in float32. So is the gradient of the bias, which sums over all rows.
    """
    return tf.cast(tf.cast(x, tf.float32) + tf.cast(bias, tf.float32), x.dtype)
