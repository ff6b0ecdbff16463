"""Rules: features that take part in all products of activations with weights.

A rule takes part in the products of every layer, of the package's and of users'. PRODUCT_RULES
contains rules that act where theta has arrays of theirs: in a child of the layer, such as the
factors of adapters, or among what training steps measure (`context.Context.beside`). A precision
has rules for its passes, which leave sensitive products, such as logits, as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

from lingvo_gshard.core import Layer, NestedMap, Seam, context, tf
from lingvo_gshard.sharding.einsum import Rounding


@dataclasses.dataclass(frozen=True)
class ProductContext:
    """The extension of the context for the weights of products.

    Attributes:
      rounding: Rounds the factors of products in training; None computes in the type of the
        activations.
      rules: More rules for products in training, beside PRODUCT_RULES.
      table_dtype: The type that rows of tables are rounded to in training; empty for the table's.
    """

    rounding: Rounding | None = None
    rules: tuple[ProductRule, ...] = ()
    table_dtype: str = ""


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of activations with a weight, or with several that are computed as one.

    Attributes:
      equation: Layouts of the activations, the weight and the result, such as "BLM,MH->BLH".
      theta: The weights of the layer.
      names: The names of the weights. Empty for a weight that is not the layer's own, such as the
        table that a softmax shares.
      layer: The layer, for the product with one weight; None otherwise.
    """

    equation: str
    theta: NestedMap
    names: tuple[str, ...] = ()
    layer: Layer | None = None


# (activations, weight) -> the product, by the following rules.
Multiply: TypeAlias = "Callable[[tf.Tensor, tf.Tensor], tf.Tensor]"


class ProductRule:
    """Takes part in all products of activations with weights. The defaults change nothing."""

    def multiply(
        self, product: Product, x: tf.Tensor, weight: Any, multiply: Multiply
    ) -> tf.Tensor:
        """Returns the product of activations with a weight.

        Args:
          weight: the weight, in the type of the weights; or what a rule has in its place.
          multiply: multiplies two factors by the following rules.
        """
        del product
        return multiply(x, weight)

    def add(self, product: Product, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """Returns a result with what the rule adds to it.

        Args:
          product: the product with one weight.
        """
        del product, x
        return y

    def factors(
        self, product: Product, x: tf.Tensor, weight: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns factors of a plain einsum in place of `multiply` and `add`.

        Args:
          product: the product with one weight, which is sensitive.
          x: the activations. The product sums over their last dimension.
          weight: the weight, a matrix. The product sums over its first dimension.
        """
        del product
        return x, weight

    def look_up(self, table: NestedMap, ids: tf.Tensor) -> tf.Tensor | None:
        """Returns float32 rows of what the rule has in place of a table; None for other rules'."""
        del table, ids

    def obstacle(self, theta: NestedMap) -> str:
        """Returns why a layer's products must be computed by the rule; "" if they need not.

        Otherwise kernels compute some products. By default a rule that multiplies is an obstacle.

        Args:
          theta: the weights of the layer, or their specs.
        """
        del theta
        if type(self).multiply is ProductRule.multiply:
            return ""
        return f"{type(self).__name__} computes its products"


PRODUCT_RULES: Seam[ProductRule] = Seam("product_rules")


def current_rules() -> list[ProductRule]:
    """Returns the rules of the current pass, the first one first."""
    return [*PRODUCT_RULES, *context.extension(ProductContext).rules]
