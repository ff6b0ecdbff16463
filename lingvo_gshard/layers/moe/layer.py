"""The mixture-of-experts layer: a feed-forward layer whose weights are chosen token by token."""

import tensorflow as tf
from absl import logging

from lingvo_gshard.core import initializers
from lingvo_gshard.core.layer import Layer
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.params import Params
from lingvo_gshard.layers import activations
from lingvo_gshard.layers.moe import dispatch
from lingvo_gshard.layers.moe.top2 import Top2Router
from lingvo_gshard.sharding import annotate, einsum, partitioning


class MixtureOfExperts(Layer):
    """E feed-forward experts and a router (arXiv 2006.16668, section 2.2 and Algorithm 2).

    Tokens are cut into groups of S that are routed apart, each with its own capacity. A batch whose
    tokens do not fill the last group is padded; the padding is routed nowhere.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.")
        p.define("hidden_dim", 0, "Size of H.")
        p.define("num_experts", 0, "Size of E.")
        p.define("group_size", 1024, "Size of S: tokens that are routed together.")
        p.define("activation", "relu", "Name of the activation, see layers/activations.py.")
        p.define("router", Top2Router.params(), "Params of the router.")
        p.define("dispatch", "gather", "'gather', or 'einsum' as in the paper.")
        p.define("auxiliary_loss_weight", 0.01, "Factor k of the load-balancing loss.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if p.group_size < 1:
            raise ValueError(f"{path}.group_size: {p.group_size}; a positive size was expected")
        self._activation = activations.get(p.activation, path)
        self._dispatch = dispatch.get(p.dispatch, path)
        for name in ("model_dim", "num_experts"):
            if p.router.get(name) not in (0, p.get(name)):
                raise ValueError(
                    f"{path}.router.{name}: {p.router.get(name)}, but {path}.{name} is "
                    f"{p.get(name)}; leave the router's 0"
                )
        router = p.router.copy().set(model_dim=p.model_dim, num_experts=p.num_experts)
        self.create_child("router", router)
        sizes = {"E": p.num_experts, "M": p.model_dim, "H": p.hidden_dim}
        self.create_variable("w_in", "EMH", sizes, initializers.fan_in(p.model_dim))
        self.create_variable("w_out", "EHM", sizes, initializers.fan_in(p.hidden_dim))

    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, mask_BL: tf.Tensor) -> tf.Tensor:
        """Returns [B,L,M]: zero for tokens that no expert took; mask is 0 at padding."""
        x_GSM, mask_GS = self._to_groups(x_BLM, mask_BL)
        routing = self.router.fprop(theta.router, x_GSM, mask_GS)
        self._report(routing, mask_GS)
        with tf.name_scope(dispatch.DISPATCH_SCOPE):
            mover = self._dispatch(routing, x_BLM.dtype)
            x_EGCM = mover.dispatch(x_GSM)
        y_EGCM = self._experts(theta, x_EGCM)
        with tf.name_scope(dispatch.COMBINE_SCOPE):
            y_GSM = mover.combine(y_EGCM)
        return self.observe(_from_groups(y_GSM, x_BLM.shape))

    def _experts(self, theta: NestedMap, x_EGCM: tf.Tensor) -> tf.Tensor:
        h_EGCH = einsum("EGCM,EMH->EGCH", x_EGCM, tf.cast(theta.w_in, x_EGCM.dtype))
        w_out = tf.cast(theta.w_out, x_EGCM.dtype)
        return einsum("EGCH,EHM->EGCM", self._activation(h_EGCH), w_out)

    def _to_groups(self, x_BLM: tf.Tensor, mask_BL: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        rows, length, model_dim = x_BLM.shape.as_list()
        tokens = rows * length
        size = min(self.p.group_size, tokens)
        groups = -(-tokens // size)
        missing = groups * size - tokens
        self._warn_of_uneven_groups(groups)
        x = tf.pad(tf.reshape(x_BLM, (tokens, model_dim)), [[0, missing], [0, 0]])
        mask = tf.reshape(tf.cast(tf.not_equal(mask_BL, 0), tf.float32), (tokens,))
        mask = tf.pad(mask, [[0, missing]])
        x_GSM = annotate(tf.reshape(x, (groups, size, model_dim)), "GSM")
        return x_GSM, annotate(tf.reshape(mask, (groups, size)), "GS")

    def _warn_of_uneven_groups(self, groups: int) -> None:
        """Groups that devices cannot share evenly are padded, and cross them on the way."""
        current = partitioning.current()
        parts = current.parts(current.split("G", path=self.path)[0]) if current else 1
        if groups % parts:
            logging.warning(
                f"{self.path}: {groups} groups of tokens over {parts} devices; with a group_size "
                f"that makes a multiple of {parts} groups less is moved and nothing padded"
            )

    def _report(self, routing, mask_GS: tf.Tensor) -> None:
        self.add_loss("auxiliary_loss", routing.auxiliary_loss * self.p.auxiliary_loss_weight)
        self.add_metric("auxiliary_loss", routing.auxiliary_loss)
        for name, value in routing.statistics(mask_GS).items():
            self.add_metric(name, value)


def _from_groups(y_GSM: tf.Tensor, shape_BLM: tf.TensorShape) -> tf.Tensor:
    rows, length, model_dim = shape_BLM.as_list()
    y = tf.reshape(y_GSM, (-1, model_dim))[: rows * length]
    return annotate(tf.reshape(y, (rows, length, model_dim)), "BLM")
