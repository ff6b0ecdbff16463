"""TensorFlow's and Keras's operations for the sweep of gradients, each with the shapes it takes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

# Rows, positions and features of the tensors. They divide by all meshes of the sweep.
B, L, C = 8, 8, 8


class Operation(NamedTuple):
    """A function of float tensors, and their shapes. The first tensor has rows and features."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]


def op(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[[], Operation]:
    """Returns what makes an operation of a function."""
    return lambda: Operation(function, shapes)


def layer(make: Callable[[], keras.Layer], shape: tuple[int, ...]) -> Callable[[], Operation]:
    """Returns what makes an operation of a Keras layer: a function of its input and its weights."""

    def build() -> Operation:
        made = make()
        made.build(shape)
        others = [variable.numpy() for variable in made.non_trainable_variables]

        def function(x: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
            return made.stateless_call(list(weights), list(map(tf.constant, others)), x)[0]

        shapes = (tuple(variable.shape) for variable in made.trainable_variables)
        return Operation(function, (shape, *shapes))

    return build


LINE, IMAGE, VOLUME = (B, L, C), (B, L, L, C), (B, 4, 4, 4, C)
INDICES = np.random.default_rng(0).integers(0, L, (B, 5)).astype(np.int32)
SEGMENTS = np.array([0, 0, 1, 2, 2, 2, 4, 4], np.int32)


def _conv(strides: Any = 1, padding: str = "SAME", dilations: Any = 1) -> Callable[..., Any]:
    return lambda x, w: tf.nn.convolution(x, w, strides, padding, dilations=dilations)


def _depthwise(stride: int = 1, dilation: int = 1) -> Callable[..., Any]:
    return lambda x, w: tf.nn.depthwise_conv2d(
        x, w, [1, stride, stride, 1], "SAME", dilations=[dilation] * 2
    )


CONVOLUTIONS = {
    "conv1d": op(_conv(), LINE, (3, C, C)),
    "conv2d": op(_conv(), IMAGE, (3, 3, C, C)),
    "conv2d strides": op(_conv(2), IMAGE, (3, 3, C, C)),
    "conv2d valid": op(_conv(1, "VALID"), IMAGE, (3, 2, C, C)),
    "conv2d dilated": op(_conv(1, "SAME", 2), IMAGE, (3, 3, C, C)),
    "conv3d": op(_conv(), VOLUME, (2, 2, 2, C, C)),
    "conv1d grouped": op(_conv(), LINE, (3, C // 2, C)),
    "conv2d grouped": op(_conv(), IMAGE, (3, 3, C // 2, C)),
    "conv2d grouped strides": op(_conv(2), IMAGE, (3, 3, C // 4, 2 * C)),
    "conv2d grouped dilated": op(_conv(1, "SAME", 2), IMAGE, (3, 3, C // 2, C)),
    "conv3d grouped": op(_conv(), VOLUME, (2, 2, 2, C // 2, C)),
    "depthwise": op(_depthwise(), IMAGE, (3, 3, C, 1)),
    "depthwise strides": op(_depthwise(2), IMAGE, (3, 3, C, 2)),
    "depthwise dilated": op(_depthwise(1, 2), IMAGE, (3, 3, C, 2)),
    "depthwise uneven rows": op(_depthwise(), (6, L, L, C), (3, 3, C, 1)),
    "depthwise few rows": op(_depthwise(), (4, L, L, C), (3, 3, C, 1)),
    "separable": op(
        lambda x, d, p: tf.nn.separable_conv2d(x, d, p, [1, 1, 1, 1], "SAME"),
        *(IMAGE, (3, 3, C, 2), (1, 1, 2 * C, C)),
    ),
    "conv1d transposed": op(
        lambda x, w: tf.nn.conv1d_transpose(x, w, (B, 2 * L, C), 2), LINE, (3, C, C)
    ),
    "conv2d transposed": op(
        lambda x, w: tf.nn.conv2d_transpose(x, w, (B, 2 * L, 2 * L, C), 2), IMAGE, (3, 3, C, C)
    ),
    "conv3d transposed": op(
        lambda x, w: tf.nn.conv3d_transpose(x, w, (B, 8, 8, 8, C), 2), VOLUME, (2, 2, 2, C, C)
    ),
    "keras conv1d causal": layer(lambda: keras.layers.Conv1D(C, 3, padding="causal"), LINE),
    "keras conv2d groups": layer(lambda: keras.layers.Conv2D(C, 3, groups=2), IMAGE),
    "keras conv3d": layer(lambda: keras.layers.Conv3D(C, 2), VOLUME),
    "keras depthwise1d": layer(lambda: keras.layers.DepthwiseConv1D(3), LINE),
    "keras depthwise2d": layer(lambda: keras.layers.DepthwiseConv2D(3, 2), IMAGE),
    "keras separable1d": layer(lambda: keras.layers.SeparableConv1D(C, 3), LINE),
    "keras separable2d": layer(lambda: keras.layers.SeparableConv2D(C, 3), IMAGE),
    "keras conv2d transposed": layer(lambda: keras.layers.Conv2DTranspose(C, 3, 2), IMAGE),
}

POOLING = {
    "max pool1d": op(lambda x: tf.nn.max_pool1d(x, 2, 2, "SAME"), LINE),
    "max pool2d": op(lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"), IMAGE),
    "max pool2d overlapping": op(lambda x: tf.nn.max_pool2d(x, 3, 2, "VALID"), IMAGE),
    "max pool3d": op(lambda x: tf.nn.max_pool3d(x, 2, 2, "SAME"), VOLUME),
    "average pool1d": op(lambda x: tf.nn.avg_pool1d(x, 2, 2, "SAME"), LINE),
    "average pool2d": op(lambda x: tf.nn.avg_pool2d(x, 3, 2, "SAME"), IMAGE),
    "average pool3d": op(lambda x: tf.nn.avg_pool3d(x, 2, 2, "VALID"), VOLUME),
    "global average": op(lambda x: tf.reduce_mean(x, (1, 2)), IMAGE),
    "global max": op(lambda x: tf.reduce_max(x, (1, 2)), IMAGE),
    "keras max pool": layer(lambda: keras.layers.MaxPooling2D(2), IMAGE),
    "keras average pool": layer(lambda: keras.layers.AveragePooling2D(2), IMAGE),
    "keras global max": layer(lambda: keras.layers.GlobalMaxPooling2D(), IMAGE),
    "keras up sampling": layer(lambda: keras.layers.UpSampling2D(2), IMAGE),
    "resize bilinear": op(lambda x: tf.image.resize(x, (2 * L, L // 2)), IMAGE),
    "patches": op(
        lambda x: tf.image.extract_patches(x, *([1, k, k, 1] for k in (2, 2, 1)), "SAME"), IMAGE
    ),
    "space to depth": op(lambda x: tf.nn.space_to_depth(x, 2), IMAGE),
    "depth to space": op(lambda x: tf.nn.depth_to_space(x, 2), IMAGE),
}

MOVES = {
    "gather": op(lambda x: tf.gather(x, INDICES[0], axis=1), LINE),
    "gather of rows": op(lambda x: tf.gather(x, INDICES[0], axis=0), LINE),
    "gather with batch": op(lambda x: tf.gather(x, INDICES, batch_dims=1), LINE),
    "gather of features": op(lambda x: tf.gather(x, INDICES[0], axis=2), LINE),
    "gather nd": op(lambda x: tf.gather_nd(x, INDICES[:, :2]), LINE),
    "scatter nd": op(lambda x: tf.scatter_nd(INDICES[:, :1], x, (L, L, C)), LINE),
    "scatter add": op(
        lambda x, y: tf.tensor_scatter_nd_add(x, INDICES[:5, :1], y), LINE, (5, L, C)
    ),
    "scatter update": op(
        lambda x, y: tf.tensor_scatter_nd_update(x, [[0], [3], [7]], y), LINE, (3, L, C)
    ),
    "scatter max": op(
        lambda x, y: tf.tensor_scatter_nd_max(x, [[0], [3], [7]], y), LINE, (3, L, C)
    ),
    "unsorted segment sum": op(lambda x: tf.math.unsorted_segment_sum(x, SEGMENTS, 6), LINE),
    "unsorted segment mean": op(lambda x: tf.math.unsorted_segment_mean(x, SEGMENTS, 6), LINE),
    "unsorted segment max": op(lambda x: tf.math.unsorted_segment_max(x, SEGMENTS, 5), LINE),
    "sort of positions": op(lambda x: tf.sort(x, 1), LINE),
    "sort of rows": op(lambda x: tf.sort(x, 0), LINE),
    "argsort": op(lambda x: tf.gather(x, tf.argsort(x, 1), axis=1, batch_dims=1), (B, L)),
    "top k": op(lambda x: tf.math.top_k(x, 3)[0], LINE),
    "slice with strides": op(lambda x: x[:, ::2, 1::3], LINE),
    "every second row": op(lambda x: x[::2] * tf.cos(x[1::2]), LINE),
    "slice backwards": op(lambda x: x[::-1, ::-2], LINE),
    "pad": op(lambda x: tf.pad(x, [[0, 0], [1, 2], [2, 1]]), LINE),
    "pad reflecting": op(lambda x: tf.pad(x, [[0, 0], [1, 2], [2, 1]], "REFLECT"), LINE),
    "roll": op(lambda x: tf.roll(x, (1, 2), (0, 1)), LINE),
    "reverse": op(lambda x: tf.reverse(x, (0, 2)), LINE),
    "concat": op(lambda x, y: tf.concat([x, y], 1), LINE, LINE),
    "stack and split": op(lambda x: tf.concat(tf.split(x, 4, 2)[::-1], 1), LINE),
    "tile": op(lambda x: tf.tile(x, (2, 1, 3)), LINE),
    "repeat": op(lambda x: tf.repeat(x, 3, 1), LINE),
    "reshape": op(lambda x: tf.reshape(x, (B // 2, 2 * L, C)) * np.arange(C), LINE),
    "band": op(lambda x: tf.linalg.band_part(x, 1, 2), LINE),
    "diagonal": op(tf.linalg.diag_part, LINE),
    "embedding": op(lambda w: tf.nn.embedding_lookup(w, INDICES), (L, C)),
}

SUMS = {
    "cumsum of positions": op(lambda x: tf.cumsum(x, 1), LINE),
    "cumsum of rows": op(lambda x: tf.cumsum(x, 0, exclusive=True), LINE),
    "cumsum reversed": op(lambda x: tf.cumsum(x, 2, reverse=True), LINE),
    "cumprod": op(lambda x: tf.math.cumprod(x, 1), LINE),
    "cumulative logsumexp": op(lambda x: tf.math.cumulative_logsumexp(x, 1), LINE),
    "logsumexp": op(lambda x: tf.reduce_logsumexp(x, (0, 2)), LINE),
    "product": op(lambda x: tf.reduce_prod(x, 1), LINE),
    "variance": op(lambda x: tf.math.reduce_variance(x, (0, 1)), LINE),
    "softmax": op(lambda x: tf.nn.softmax(x, 1), LINE),
    "matmul": op(tf.matmul, LINE, (B, C, 4)),
    "einsum": op(lambda x, w: tf.einsum("blc,cd->bld", x, w), LINE, (C, 2 * C)),
    "einsum ellipsis": op(lambda x, y: tf.einsum("...lc,...mc->...lm", x, y), IMAGE, IMAGE),
    "einsum broadcast": op(lambda x, w: tf.einsum("...c,cd->...d", x, w), IMAGE, (C, C)),
    "einsum rows": op(lambda x, y: tf.einsum("blc,bld->cd", x, y), LINE, (B, L, 4)),
    "fft": op(lambda x: tf.abs(tf.signal.fft(tf.cast(x, tf.complex64))) ** 2, LINE),
    "rfft": op(lambda x: tf.abs(tf.signal.rfft(x)) ** 2, LINE),
    "rfft2d": op(lambda x: tf.abs(tf.signal.rfft2d(x)) ** 2, LINE),
    "irfft": op(lambda x: tf.signal.irfft(tf.signal.rfft(x) * 2), LINE),
    "cholesky": op(lambda x: tf.linalg.cholesky(tf.matmul(x, x, transpose_b=True) + EYE), LINE),
    "solve": op(lambda x, y: tf.linalg.triangular_solve(x + EYE, y), LINE, LINE),
    "inverse": op(lambda x: tf.linalg.inv(x / 8 + EYE), LINE),
}
EYE = 4 * np.eye(L, dtype=np.float32)


def _attention(x: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
    return keras.ops.nn.dot_product_attention(x, weights[0], weights[1], is_causal=True)


LAYERS = {
    "lstm": layer(lambda: keras.layers.LSTM(C, return_sequences=True), LINE),
    "lstm unrolled": layer(lambda: keras.layers.LSTM(C, unroll=True), LINE),
    "gru": layer(lambda: keras.layers.GRU(C), LINE),
    "simple rnn": layer(lambda: keras.layers.SimpleRNN(C, go_backwards=True), LINE),
    "bidirectional": layer(lambda: keras.layers.Bidirectional(keras.layers.LSTM(C)), LINE),
    "conv lstm": layer(lambda: keras.layers.ConvLSTM1D(C, 3), (B, 3, L, C)),
    "attention": op(_attention, *((B, L, 4, C),) * 3),
    "keras additive attention": op(
        lambda x, y: keras.layers.AdditiveAttention(use_scale=False)([x, y]), LINE, LINE
    ),
    "layer norm": layer(lambda: keras.layers.LayerNormalization(), LINE),
    "group norm": layer(lambda: keras.layers.GroupNormalization(2), LINE),
    "unit norm": layer(lambda: keras.layers.UnitNormalization(), LINE),
    "spectral norm": layer(
        lambda: keras.layers.SpectralNormalization(keras.layers.Dense(C)), (B, C)
    ),
    "batch norm": op(lambda x, g, b: _batch_norm(x, g, b), LINE, (C,), (C,)),
    "fused batch norm": op(
        lambda x, g, b: tf.compat.v1.nn.fused_batch_norm(x, g, b)[0], IMAGE, (C,), (C,)
    ),
    "dense": layer(lambda: keras.layers.Dense(C), LINE),
    "einsum dense": layer(
        lambda: keras.layers.EinsumDense("...c,cd->...d", output_shape=(L, C)), LINE
    ),
    "prelu": layer(lambda: keras.layers.PReLU(), LINE),
    "ctc": op(
        lambda x: keras.ops.ctc_loss(INDICES % C, x, np.full(B, 2), np.full(B, L), mask_index=0),
        LINE,
    ),
}


def _batch_norm(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, (0, 1))
    return tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-3)


OPERATIONS = {**CONVOLUTIONS, **POOLING, **MOVES, **SUMS, **LAYERS}
