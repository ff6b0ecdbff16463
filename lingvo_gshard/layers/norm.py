"""Normalization over the model dimension, computed in float32."""

from __future__ import annotations

from lingvo_gshard.core import Layer, NestedMap, Params, custom_gradient, initializers, layer_method
from lingvo_gshard.core.layer import SCALE
from lingvo_gshard.core.lazy import tf


class LayerNorm(Layer):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias. Ba et al. 2016, arXiv 1607.06450."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.", minimum=1)
        p.define("epsilon", 1e-6, "Added to the variance.", above=0)
        p.define("use_bias", True, "Whether a bias is added.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        sizes = {"M": self.p.model_dim}
        self.create_variable("scale", "M", sizes, initializers.constant(1.0), role=SCALE)
        if self.p.use_bias:
            self.create_variable("bias", "M", sizes, initializers.constant(0.0))

    @layer_method
    def fprop(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Returns x [..., M] normalized over M, in x's type."""
        scale = tf.cast(theta.scale, tf.float32)
        bias = tf.cast(theta.bias, tf.float32) if self.p.use_bias else tf.zeros_like(scale)
        return tf.cast(layer_norm(tf.cast(x, tf.float32), scale, bias, self.p.epsilon), x.dtype)


def layer_norm(x: tf.Tensor, scale: tf.Tensor, bias: tf.Tensor, epsilon: float) -> tf.Tensor:
    """Returns LayerNorm over the last dimension of x, all float32.

    Its gradient is written by hand, with few passes over x.
    """
    model_dim = x.shape[-1]

    @custom_gradient
    def compute(x: tf.Tensor, scale: tf.Tensor, bias: tf.Tensor):
        centered = x - tf.reduce_mean(x, -1, keepdims=True)
        # With epsilon inside the mean, XLA for CPU sums with its vectorized library, which it does
        # not use for a mean of products.
        inverse = tf.math.rsqrt(tf.reduce_mean(tf.square(centered) + epsilon, -1, keepdims=True))

        def gradient(dy: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            normalized = centered * inverse
            product = dy * normalized
            mean = _times(dy, scale)[..., None] / model_dim
            slope = _times(product, scale)[..., None] / model_dim
            dx = inverse * (dy * scale - mean - normalized * slope)
            return dx, _sum_to_last(product), _sum_to_last(dy)

        return centered * inverse * scale + bias, gradient

    return compute(x, scale, bias)


def _times(x: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Returns the product of x [..., M] and scale [M].

    tf.tensordot would merge the leading dimensions, and one of them may be split.
    """
    return tf.einsum("...m,m->...", x, scale)


def _sum_to_last(x: tf.Tensor) -> tf.Tensor:
    """Returns the sum over all dimensions but the last.

    It sums within each row first, as a mean. Of two plain sums XLA makes one, which is slower on a
    CPU.
    """
    if x.shape.rank < 3:
        return tf.reduce_sum(x, range(x.shape.rank - 1))
    return tf.reduce_sum(tf.reduce_mean(x, -2), range(x.shape.rank - 2)) * x.shape[-2]


class RMSNorm(Layer):
    """x / sqrt(mean(x^2) + epsilon) * scale. Zhang and Sennrich 2019, arXiv 1910.07467."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.", minimum=1)
        p.define("epsilon", 1e-6, "Added to the mean square.", above=0)
        p.define(
            "zero_centered", False, "Whether weights are scale - 1, as Gemma's (arXiv 2403.08295)."
        )
        p.define("has_scale", True, "Whether there is a weight; without it the scale is 1.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        initial = initializers.constant(0.0 if self.p.zero_centered else 1.0)
        if self.p.has_scale:
            self.create_variable("scale", self._layout, self._sizes(), initial, role=SCALE)

    # The letters of the weight. The mean is taken over all of them.
    _layout = "M"

    def _sizes(self) -> dict[str, int]:
        return {"M": self.p.model_dim}

    @layer_method
    def fprop(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Returns x [..., M] normalized over M, in x's type."""
        x_float = tf.cast(x, tf.float32)
        axes = list(range(-len(self._layout), 0))
        mean_square = tf.reduce_mean(tf.square(x_float), axes, keepdims=True)
        normalized = x_float * tf.math.rsqrt(mean_square + self.p.epsilon)
        if not self.p.has_scale:
            return tf.cast(normalized, x.dtype)
        scale = tf.cast(theta.scale, tf.float32)
        if self.p.zero_centered:
            scale += 1.0
        return tf.cast(normalized * scale, x.dtype)
