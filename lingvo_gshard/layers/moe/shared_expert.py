"""The shared expert of a mixture of experts, which computes every token.

Its output is added to the output of the routed experts (Dai et al. 2024, arXiv 2401.06066, section
3.2). With residual MoE (Rajbhandari et al. 2022, arXiv 2201.05596, section 4.1) both outputs are
weighted by a learned softmax. With a gate, the shared output is multiplied with a learned sigmoid,
as in Qwen2-MoE (arXiv 2407.10671, section 2.2.2).
"""

from __future__ import annotations

from lingvo_gshard.core import MATRIX, Layer, NestedMap, Params, initializers, tf
from lingvo_gshard.layers import feed_forward
from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.sharding import einsum

_SUM, _LEARNED, _GATED = _COMBINATIONS = ("sum", "learned", "gated")


def define(p: Params) -> None:
    """Defines the hyperparameters of the shared expert."""
    p.define("shared_hidden_dim", 0, "Hidden size of the shared expert; 0: none.", minimum=0)
    p.define("shared_combination", _SUM, "How its output is combined.", choices=_COMBINATIONS)


def create(layer: Layer) -> None:
    """Creates the shared expert as the child `shared` of a mixture of experts."""
    p = layer.p
    shared = FeedForward.params().set(
        model_dim=p.model_dim,
        hidden_dim=p.shared_hidden_dim,
        use_bias=p.experts.use_bias,
        **feed_forward.options(p.experts),
    )
    layer.create_child("shared", shared)
    if p.shared_combination != _SUM:
        init = initializers.fan_in(p.model_dim)
        layer.create_variable("w_mix", "M", {"M": p.model_dim}, init, role=MATRIX)


def combine(
    layer: Layer, theta: NestedMap, x_BLM: tf.Tensor, mask_BL: tf.Tensor, y_BLM: tf.Tensor
) -> tf.Tensor:
    """Returns the combined output of the routed experts and the shared expert."""
    shared_BLM = layer.shared.fprop(theta.shared, x_BLM, mask_BL)
    if layer.p.shared_combination == _SUM:
        return y_BLM + shared_BLM
    x_float, w_mix = tf.cast(x_BLM, tf.float32), tf.cast(theta.w_mix, tf.float32)
    mix_BL = tf.nn.sigmoid(einsum("BLM,M->BL", x_float, w_mix))
    mix_BL1 = tf.cast(mix_BL, x_BLM.dtype)[..., None]
    if layer.p.shared_combination == _GATED:
        return y_BLM + shared_BLM * mix_BL1
    return y_BLM * mix_BL1 + shared_BLM * (1.0 - mix_BL1)
