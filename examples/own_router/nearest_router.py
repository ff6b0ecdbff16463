"""NearestRouter: sends each token to the expert nearest to the token's mean activation."""

import tensorflow as tf

from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.layers.moe.routers import selection
from lingvo_gshard.layers.moe.routers.capacity import TokenCapacity
from lingvo_gshard.layers.moe.routers.router import Router
from lingvo_gshard.layers.moe.routing import Choice


class NearestRouter(Router):
    """Has a target for each expert, and no weights."""

    capacity = TokenCapacity()

    @classmethod
    def params(cls):
        p = super().params()
        p.define("spread", 0.5, "Distance between the targets of neighboring experts.")
        return p

    @classmethod
    def experts_per_token(cls, params):
        """Returns 1."""
        return 1

    @layer_method
    def fprop(self, theta, x_GSM, mask_GS, ids_GS=None):
        """Returns the routing of a batch."""
        targets_E = self.p.spread * tf.range(self.p.num_experts, dtype=tf.float32)
        mean_GS1 = tf.reduce_mean(tf.cast(x_GSM, tf.float32), -1, keepdims=True)
        gates_GSE = tf.nn.softmax(-tf.square(mean_GS1 - targets_E))
        expert_GS, one_hot_GSE = selection.top_1(gates_GSE)
        gate_GS = selection.value_at(gates_GSE, one_hot_GSE)
        return self.capacity.route([Choice(expert_GS, gate_GS, mask_GS, mask_GS)])
