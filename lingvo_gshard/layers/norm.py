"""Normalisation over the model dimension, computed in float32."""

import tensorflow as tf

from lingvo_gshard.core import initializers
from lingvo_gshard.core.layer import Layer
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.params import Params


class LayerNorm(Layer):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias. Ba et al. 2016, arXiv 1607.06450."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.")
        p.define("epsilon", 1e-6, "Added to the variance.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        sizes = {"M": self.p.model_dim}
        self.create_variable("scale", "M", sizes, initializers.constant(1.0))
        self.create_variable("bias", "M", sizes, initializers.constant(0.0))

    def fprop(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Returns x [..., M] normalised over M, in x's type."""
        x_float = tf.cast(x, tf.float32)
        centred = x_float - tf.reduce_mean(x_float, -1, keepdims=True)
        variance = tf.reduce_mean(tf.square(centred), -1, keepdims=True)
        normalised = centred * tf.math.rsqrt(variance + self.p.epsilon)
        scale, bias = tf.cast(theta.scale, tf.float32), tf.cast(theta.bias, tf.float32)
        return tf.cast(normalised * scale + bias, x.dtype)


class RMSNorm(Layer):
    """x / sqrt(mean(x^2) + epsilon) * scale. Zhang and Sennrich 2019, arXiv 1910.07467."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.")
        p.define("epsilon", 1e-6, "Added to the mean square.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        sizes = {"M": self.p.model_dim}
        self.create_variable("scale", "M", sizes, initializers.constant(1.0))

    def fprop(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Returns x [..., M] normalised over M, in x's type."""
        x_float = tf.cast(x, tf.float32)
        mean_square = tf.reduce_mean(tf.square(x_float), -1, keepdims=True)
        normalised = x_float * tf.math.rsqrt(mean_square + self.p.epsilon)
        return tf.cast(normalised * tf.cast(theta.scale, tf.float32), x.dtype)
