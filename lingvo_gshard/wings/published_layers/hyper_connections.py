"""Hyper-connections: several residual streams, which each sublayer reads and writes as mixtures."""

from __future__ import annotations

from lingvo_gshard.core import (
    BIAS,
    SCALE,
    Layer,
    NestedMap,
    Params,
    TokenShape,
    UserError,
    custom_gradient,
    initializers,
    layer_method,
    optimization_barrier,
    tf,
)
from lingvo_gshard.layers import RMSNorm, TransformerLayer, TransformerStack, inherit
from lingvo_gshard.sharding import annotate, einsum
from lingvo_gshard.wings.facts.flops import flops

LOCAL_LETTERS = {
    "s": "residual streams",
    "o": "residual streams after a sublayer",
    "c": "coefficients of mixtures",
    "a": "kinds of coefficients",
}


class StreamReader(Layer):
    """Makes one vector of the streams of a token: their sum with learned weights.

    The weights are sigmoids of products with all streams, which are normalized as one vector. The
    streams [B,L,M] of a token are one vector, too: M is `streams` times `model_dim`.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of a stream.", minimum=1)
        p.define("streams", 4, "Number of streams.", minimum=1)
        p.define("epsilon", 1e-6, "Added to weights, and to sums that divide them.", above=0)
        p.define("norm", RMSNorm.params(), "Params of the norm of the streams.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p, size, counts = self.p, self.p.streams * self.p.model_dim, self._counts()
        sizes = {"M": size, "c": sum(counts), "a": len(counts)}
        self.create_variable("w", "Mc", sizes, initializers.fan_in(size))
        self.create_variable("bias", "c", sizes, initializers.constant(0.0), role=BIAS)
        self.create_variable("scale", "a", sizes, initializers.constant(1.0), role=SCALE)
        self.create_child("norm", p.norm.copy().set(model_dim=size, has_scale=False))

    def _counts(self) -> tuple[int, ...]:
        """Returns the number of coefficients of each kind. The sum has one for each stream."""
        return (self.p.streams,)

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor) -> tf.Tensor:
        """Returns the sum [B,L,M] of the streams, of the size of one."""
        weights_sBL = tf.sigmoid(self._logits(theta, x_BLM, 0)) + self.p.epsilon
        weights_BLs = tf.transpose(weights_sBL, [1, 2, 0])
        sum_BLM = tf.reduce_sum(weights_BLs[..., None] * self.split(x_BLM), 2)
        return annotate(tf.cast(sum_BLM, x_BLM.dtype), "BLM")

    @layer_method
    def _logits(self, theta: NestedMap, x_BLM: tf.Tensor, kind: int) -> tf.Tensor:
        """Returns the logits of the coefficients of a kind, float32 [c,B,L].

        Tokens come last: a device computes with many of them at once, not with four coefficients.
        """
        start = sum(self._counts()[:kind])
        here = slice(start, start + self._counts()[kind])
        w_Mc, bias_c, scale_a = (tf.cast(theta[n], tf.float32) for n in ("w", "bias", "scale"))
        x_BLM = self.norm.fprop(theta.norm, tf.cast(x_BLM, tf.float32))
        # The same product for all kinds, which XLA then computes once.
        logits_cBL = annotate(einsum("Mc,BLM->cBL", w_Mc, x_BLM), "cBL")
        return logits_cBL[here] * scale_a[kind] + bias_c[here, None, None]

    def split(self, x_BLM: tf.Tensor) -> tf.Tensor:
        """Returns the streams, float32 [B,L,s,M]."""
        shape = [*x_BLM.shape[:2], self.p.streams, self.p.model_dim]
        return annotate(tf.reshape(tf.cast(x_BLM, tf.float32), shape), "BLsM")


class StreamMixer(StreamReader):
    """Reads the streams for a sublayer, and writes the sublayer's output back.

    Each stream gets the output with a weight of its own, 2 sigmoid(...), and a mixture of all
    streams. The rows and columns of the mixture's matrix have sums of 1, by Sinkhorn and Knopp's
    iterations (manifold-constrained hyper-connections, Xie et al. 2026; DeepSeek-V4, section 2.2).
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("iterations", 20, "Iterations of Sinkhorn and Knopp.", minimum=1)
        return p

    def _counts(self) -> tuple[int, ...]:
        """Returns the number of coefficients: of the sum, of the output, and of the matrix."""
        return (self.p.streams, self.p.streams, self.p.streams**2)

    @layer_method
    def write(self, theta: NestedMap, x_BLM: tf.Tensor, h_BLM: tf.Tensor) -> tf.Tensor:
        """Returns the streams after a sublayer with the output h."""
        post_oBL = 2.0 * tf.sigmoid(self._logits(theta, x_BLM, 1))
        post_BLo = tf.transpose(post_oBL, [1, 2, 0])
        written_BLoM = post_BLo[..., None] * tf.cast(h_BLM, tf.float32)[:, :, None]
        matrix_BLso = tf.transpose(self.matrix(theta, x_BLM), [2, 3, 0, 1])
        # No product of matrices: XLA for GPUs finds no tiles for many of 4x4.
        mixed_BLoM = tf.reduce_sum(matrix_BLso[..., None] * self.split(x_BLM)[:, :, :, None], 2)
        streams_BLM = tf.reshape(mixed_BLoM + written_BLoM, x_BLM.shape)
        return annotate(tf.cast(streams_BLM, x_BLM.dtype), "BLM")

    @layer_method
    def matrix(self, theta: NestedMap, x_BLM: tf.Tensor) -> tf.Tensor:
        """Returns the weight of each stream in each stream after the sublayer: [s,o,B,L]."""
        n, epsilon = self.p.streams, self.p.epsilon
        logits = tf.reshape(self._logits(theta, x_BLM, 2), [n, n, *x_BLM.shape[:2]])
        matrix = _apart(tf.nn.softmax(logits, 1) + epsilon)
        # A quotient of the matrix and its own sum would be a softmax, too: factors of the rows and
        # of the columns go from sum to sum instead.
        rows, columns = 1.0, tf.ones_like(matrix[:1])
        for iteration in range(self.p.iterations):
            if iteration:
                rows /= rows * tf.reduce_sum(matrix * columns, 1, keepdims=True) + epsilon
            columns /= columns * tf.reduce_sum(matrix * rows, 0, keepdims=True) + epsilon
        return matrix * rows * columns


def _apart(x: tf.Tensor) -> tf.Tensor:
    """Returns x, and keeps XLA from fusing what makes x with what uses it.

    XLA for GPUs computes softmaxes by Triton, whose kernels grow by what is computed with them. It
    searches the tiles of each kernel, which takes hours for forty sums one after another.
    """

    def passed(x: tf.Tensor) -> tf.Tensor:
        return optimization_barrier([x])[0][0]

    return custom_gradient(lambda x: (passed(x), passed))(x)


class HyperLayer(TransformerLayer):
    """A Transformer layer whose sublayers read and write several residual streams."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("mixer", StreamMixer.params(), "Params of the mixtures of each sublayer.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        if self.p.norm_position != "before":
            raise UserError(
                f"{path}.norm_position: {self.p.norm_position!r}; 'before' was expected with "
                "residual streams"
            )

    def _create_sublayer(self, name: str, params: Params) -> None:
        super()._create_sublayer(name, params)
        self.create_child(f"{name}_mixer", inherit(self.p.mixer, model_dim=self.p.model_dim))

    def enter(self, name: str, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Returns the input of a sublayer, of the size of one stream."""
        mixer = f"{name}_mixer"
        return super().enter(name, theta, getattr(self, mixer).fprop(theta[mixer], x))

    def add(self, name: str, theta: NestedMap, x: tf.Tensor, h: tf.Tensor) -> tf.Tensor:
        """Returns the streams x after a sublayer with the output h."""
        mixer, dropout = f"{name}_mixer", f"{name}_dropout"
        h = getattr(self, dropout).fprop(theta[dropout], h)
        h *= tf.constant(self.p.residual_scale, h.dtype)
        return getattr(self, mixer).write(theta[mixer], x, h)


class HyperStack(TransformerStack):
    """A stack of layers with residual streams. Each stream begins as the input.

    Its first layers may have attentions and routers of their own.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("first_attentions", (), "Params of the self-attentions of the first layers.")
        p.define("first_routed", 0, "Number of first layers with `first_router`.", minimum=0)
        p.define("first_router", None, "Params of the router of the first layers with experts.")
        return p.set(layer=HyperLayer.params())

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        mixer = self.p.layer.mixer
        reader = StreamReader.params().set(model_dim=self.p.model_dim)
        reader.set(streams=mixer.streams, epsilon=mixer.epsilon, norm=mixer.norm)
        self.create_child("reader", reader)

    def layer_params(self, index: int) -> Params:
        """Returns the Params of layer `index`, with all that the stack sets."""
        p, layer = self.p, super().layer_params(index)
        if index < len(p.first_attentions):
            sizes = {"num_heads": p.num_heads, "dropout_rate": p.attention_dropout_rate}
            layer.self_attention = inherit(p.first_attentions[index], **sizes)
            layer.self_attention.is_causal = self.is_causal
        if index < p.first_routed and "router" in layer.feed_forward:
            layer.feed_forward.router = p.first_router.copy()
        return layer

    def begin(self, theta: NestedMap, x_BLM: tf.Tensor) -> tf.Tensor:
        """Returns the streams that the first layer reads."""
        x_BLM = super().begin(theta, x_BLM)
        return annotate(tf.tile(x_BLM, [1, 1, self.reader.p.streams]), "BLM")

    def finish(self, theta: NestedMap, x_BLM: tf.Tensor) -> tf.Tensor:
        """Returns the output of the stack for the streams of the last layer."""
        return super().finish(theta, self.reader.fprop(theta.reader, x_BLM))


@flops.register(StreamReader)
def _(layer: StreamReader, shape: TokenShape) -> int:
    p = layer.p
    mixed = p.streams if isinstance(layer, StreamMixer) else 0
    return 2 * shape.tokens * p.streams * p.model_dim * (sum(layer._counts()) + mixed)
