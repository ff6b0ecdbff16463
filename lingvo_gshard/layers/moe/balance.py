"""How evenly a routing loads its experts, as metrics."""

from collections.abc import Callable

import tensorflow as tf

from lingvo_gshard.layers.moe.routing import Routing, SlotRouting


def statistics(routing: Routing | SlotRouting, mask_GS: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns float32 scalars that describe the load of the experts.

    Load counts the tokens an expert keeps, of all groups together.

    load_max_over_mean    the largest load over the mean one; 1: even
    dropped_share         of the places that tokens asked for, those not given; where experts
                          choose tokens, of real tokens those that none chose
    utilization           of the places there are, those taken
    dead_experts          how many experts keep no token
    """
    load_E = routing.load()
    total = tf.reduce_sum(load_E)
    places = mask_GS.shape[0] * routing.num_experts * routing.capacity
    return {
        "load_max_over_mean": tf.reduce_max(load_E) * routing.num_experts / tf.maximum(total, 1.0),
        "dropped_share": routing.dropped_share(mask_GS),
        "utilization": total / places,
        "dead_experts": tf.reduce_sum(tf.cast(tf.equal(load_E, 0.0), tf.float32)),
    }


def by_expert(
    routing: Routing | SlotRouting, mask_GS: tf.Tensor
) -> dict[str, Callable[[], tf.Tensor]]:
    """Returns what a layer shows to those who observe it, as functions that compute it, float32.

    load      [E]: how many tokens each expert keeps
    gate      [E]: the sum of the gates that its outputs for them are weighted by
    tokens    scalar: how many real tokens there are
    places    scalar: how many places there are
    """
    places = float(mask_GS.shape[0] * routing.num_experts * routing.capacity)
    return {
        "load": routing.load,
        "gate": routing.gate_sums,
        "tokens": lambda: tf.reduce_sum(mask_GS),
        "places": lambda: tf.constant(places),
    }


def entropy(gates_GSE: tf.Tensor, mask_GS: tf.Tensor) -> tf.Tensor:
    """Returns the mean over real tokens of the entropy of their gates, in nats, float32."""
    entropy_GS = -tf.reduce_sum(tf.math.xlogy(gates_GSE, gates_GSE), -1)
    return tf.reduce_sum(entropy_GS * mask_GS) / tf.maximum(tf.reduce_sum(mask_GS), 1.0)
