"""Low-rank adapters of weights: LoRA (Hu et al. 2021, arXiv 2106.09685).

The product of x with an adapted weight W becomes x W + (alpha / rank) (x A) B (section 4.1). A has
the letters that the product sums over, and the rank; B has the rank and the other letters of W. So
every strategy splits both as it splits W:

    w_query MND    w_query_a Mz    w_query_b zND
    w_out   EHM    w_out_a   EHz   w_out_b   EzM

A layer with adapted weights has a child `lora` that holds the factors. B starts at 0, so that the
first step computes what the model without adapters does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lingvo_gshard.core import (
    MATRIX,
    Layer,
    NestedMap,
    Params,
    VariableSpec,
    context,
    initializers,
    layer_method,
    letters,
    tf,
)
from lingvo_gshard.layers import PRODUCT_RULES, Dropout, Product, ProductRule, products

LOCAL_LETTERS = {"z": "rank of an adapter"}

# Name of the child that holds the factors of a layer's weights.
CHILD = "lora"
RANK = "z"


class Adapters(Layer):
    """The adapters of one layer's weights.

    The factors are float32 with every precision: their updates may be small.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("rank", 0, "Rank of the adapters.", minimum=1)
        p.define("scale", 1.0, "Factor of an adapter's product.", minimum=0)
        p.define_fraction("dropout_rate", 0.0, "Share of the inputs that is dropped.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        self.create_child("dropout", Dropout.params().set(rate=self.p.dropout_rate))

    def add(self, name: str, spec: VariableSpec) -> None:
        """Declares the factors of a weight by its name in its layer.

        `spec` has the letters that products with the weight sum over.
        """
        sizes = {**dict(zip(spec.layout, spec.shape, strict=True)), RANK: self.p.rank}
        batch = "".join(letter for letter in spec.layout if letter in letters.WEIGHT_BATCH)
        rest = "".join(x for x in spec.layout if x not in batch + spec.inputs)
        fan_in = math.prod(sizes[letter] for letter in spec.inputs)
        down, up = initializers.fan_in(fan_in), initializers.constant(0.0)
        self.create_variable(f"{name}_a", f"{batch}{spec.inputs}{RANK}", sizes, down, role=MATRIX)
        self.create_variable(f"{name}_b", f"{batch}{RANK}{rest}", sizes, up, role=MATRIX)

    @layer_method
    def fprop(self, theta: NestedMap, name: str, equation: str, x: tf.Tensor) -> tf.Tensor:
        """Returns what the adapter of a weight adds to a product; see `reduce`."""
        _, right, output, batch, summed = _letters(equation)
        rest = "".join(letter for letter in right if letter not in batch + summed)
        x_low, low = self.reduce(theta, name, equation, x)
        with context.override(saved_products=None), products.unrounded():
            return products.multiply(
                f"{low},{batch}{RANK}{rest}->{output}", x_low, theta[f"{name}_b"]
            )

    @layer_method
    def reduce(
        self, theta: NestedMap, name: str, equation: str, x: tf.Tensor
    ) -> tuple[tf.Tensor, str]:
        """Returns activations times the first factor of a weight, scaled, and their letters.

        `equation` multiplies x with the weight.
        """
        left, _, _, batch, summed = _letters(equation)
        low = "".join(letter for letter in left if letter not in summed) + RANK
        # These products are cheap to repeat, so that remat policies need not know them.
        with context.override(saved_products=None), products.unrounded():
            x = self.dropout.fprop(theta.dropout, x)
            x_low = products.multiply(f"{left},{batch}{summed}{RANK}->{low}", x, theta[f"{name}_a"])
            return x_low * tf.constant(self.p.scale, x_low.dtype), low


def _letters(equation: str) -> tuple[str, str, str, str, str]:
    """Returns the letters of both factors of a product, of the result, its batch, and summed ones.

    The groups of a product such as BLND,NDr->BLNr have one first factor of an adapter together.
    """
    inputs, _, output = equation.partition("->")
    left, right = inputs.split(",")
    shared = [letter for letter in right if letter in left]
    batch = "".join(x for x in shared if x in output and x in letters.WEIGHT_BATCH)
    return left, right, output, batch, "".join(x for x in shared if x not in output)


class _Rule(ProductRule):
    """Adds what adapters add to the products with their weights."""

    def add(self, product: Product, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """Returns a result, plus the product with the weight's adapter if it has one."""
        (name,) = product.names
        if not _has_adapter(product.theta, name):
            return y
        adapters = getattr(product.layer, CHILD)
        return y + adapters.fprop(product.theta[CHILD], name, product.equation, x)

    def factors(
        self, product: Product, x: tf.Tensor, weight: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns factors whose dimension that is summed is longer by the rank of the adapter."""
        (name,) = product.names
        if not _has_adapter(product.theta, name):
            return x, weight
        theta = product.theta[CHILD]
        x_low, _ = getattr(product.layer, CHILD).reduce(theta, name, product.equation, x)
        both = [tf.cast(w, x.dtype) for w in (weight, theta[f"{name}_b"])]
        return tf.concat([x, x_low], -1), tf.concat(both, 0)

    def obstacle(self, theta: NestedMap) -> str:
        """Returns that a layer's weights have adapters, if they do."""
        return "its weights have adapters" if theta.get(CHILD) else ""


PRODUCT_RULES.register("adapters")(_Rule())


def _has_adapter(theta: NestedMap, name: str) -> bool:
    return CHILD in theta and f"{name}_a" in theta[CHILD]


def is_factor(path: str) -> bool:
    """Returns whether a path leads to a factor of an adapter."""
    return f".{CHILD}." in path or path.startswith(f"{CHILD}.")


def factors_of(path: str) -> tuple[str, str]:
    """Returns the paths that the factors of a weight have if it has an adapter."""
    layer, dot, name = path.rpartition(".")
    return f"{layer}{dot}{CHILD}.{name}_a", f"{layer}{dot}{CHILD}.{name}_b"


def without_factors(tree: Any) -> Any:
    """Returns a tree of weights, or of their specs, without the adapters."""
    if isinstance(tree, dict):
        kept = {name: child for name, child in tree.items() if name != CHILD}
        return NestedMap({name: without_factors(child) for name, child in kept.items()})
    if isinstance(tree, (list, tuple)):
        return [without_factors(child) for child in tree]
    return tree


def switched_off(theta: NestedMap) -> NestedMap:
    """Returns the weights of a model whose adapters add nothing to its products.

    The tree stays as it is, since layers compare it with their declarations.
    """
    return theta.transform_with_path(
        lambda path, w: tf.zeros_like(w) if is_factor(path) and path.endswith("_b") else w
    )


# compute(spec of a weight, equation, A, B, W) returns W + scale A B.
Merge = Callable[[VariableSpec, str, Any, Any, Any], Any]


def merged(specs: Any, theta: Any, merge: Merge) -> Any:
    """Returns a tree of weights without adapters, each adapted weight merged with its adapter."""
    if isinstance(specs, (list, tuple)):
        return [merged(s, t, merge) for s, t in zip(specs, theta, strict=True)]
    if not isinstance(specs, dict):
        return theta
    result = NestedMap({n: merged(s, theta[n], merge) for n, s in specs.items() if n != CHILD})
    for name in _adapted(specs):
        pair = [specs[CHILD][f"{name}_{factor}"].layout for factor in "ab"]
        a, b = (theta[CHILD][f"{name}_{factor}"] for factor in "ab")
        equation = f"{pair[0]},{pair[1]}->{specs[name].layout}"
        result[name] = merge(specs[name], equation, a, b, theta[name])
    return result


def _adapted(specs: Mapping[str, Any]) -> Sequence[str]:
    """Returns the names of the weights of one layer that have adapters."""
    factors = specs.get(CHILD, {})
    return [name[:-2] for name in factors if name.endswith("_a")]
