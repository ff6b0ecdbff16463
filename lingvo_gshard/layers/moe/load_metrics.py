"""Reports on a routing: losses and metrics of expert loads."""

from __future__ import annotations

from collections.abc import Callable

from lingvo_gshard.core import Layer, tf
from lingvo_gshard.core.context import Metric
from lingvo_gshard.layers import token_context
from lingvo_gshard.layers.moe.groups import Groups
from lingvo_gshard.layers.moe.routing import Routing

# Names of a metric and of a loss of a routing.
ENTROPY = "router_entropy"
BALANCE_LOSS = "auxiliary_loss"
# Names the gate of each expert for each token, [B,L,E], to observers.
TOKEN_GATES = "token_gates"


def report(layer: Layer, routing: Routing, mask_GS: tf.Tensor, groups: Groups) -> None:
    """Reports losses, metrics and observations of a routing under the path of its layer.

    Args:
      mask_GS: float32, 0 at padding.
    """
    tokens = tf.reduce_sum(mask_GS)
    for name, loss in routing.losses.items():
        count = tokens if loss.count is None else loss.count
        layer.add_loss(name, loss.value * loss.weight, count)
        layer.add_metric(name, loss.value, count)
    for name, value in routing.metrics.items():
        layer.add_metric(name, value, tokens)
    for name, (value, weight) in load_metrics(routing, mask_GS).items():
        layer.add_metric(name, value, weight)
    for name, compute in expert_observations(routing, mask_GS).items():
        layer.observe_named(name, compute)
    on_routing = token_context.current().on_routing
    if on_routing is not None:
        on_routing(layer, routing, mask_GS, groups)
    observe_gates(layer, routing, groups)


def observe_gates(layer: Layer, routing: Routing, groups: Groups) -> None:
    """Reports the gates of all tokens to observers; see `TOKEN_GATES`."""
    layer.observe_named(TOKEN_GATES, lambda: groups.merge(routing.token_gates()))


def load_metrics(routing: Routing, mask_GS: tf.Tensor) -> dict[str, Metric]:
    """Returns float32 scalars that describe the load of the experts over all groups, and weights.

    The load of an expert is the number of tokens that it keeps. A weight is what the value is a
    mean over: requests or slots. The largest load and the number of dead experts are no means;
    their weight is the number of real tokens. So a batch of padding alone counts only in the
    utilization.

    load_max_over_mean    the largest load over the mean load; 1 is even
    dropped_share         share of the requested capacity slots that were full; with expert choice,
                          share of the real tokens that no expert chose
    utilization           share of the capacity slots that hold a token
    dead_experts          number of experts that keep no token
    """
    load_E = routing.load()
    total, tokens = tf.reduce_sum(load_E), tf.reduce_sum(mask_GS)
    slots = tf.constant(float(mask_GS.shape[0] * routing.num_experts * routing.capacity))
    max_over_mean = tf.reduce_max(load_E) * routing.num_experts / tf.maximum(total, 1.0)
    dead_experts = tf.reduce_sum(tf.cast(tf.equal(load_E, 0.0), tf.float32))
    return {
        "load_max_over_mean": (max_over_mean, tokens),
        "dropped_share": (routing.dropped_share(mask_GS), routing.requests(mask_GS)[0]),
        "utilization": (total / slots, slots),
        "dead_experts": (dead_experts, tokens),
    }


def expert_observations(routing: Routing, mask_GS: tf.Tensor) -> dict[str, Callable[[], tf.Tensor]]:
    """Returns functions that compute the float32 tensors that a layer passes to observers.

    load      [E]: tokens that each expert keeps
    gate      [E]: sum of the gates of these tokens
    tokens    scalar: real tokens
    slots     scalar: capacity slots
    """
    slots = float(mask_GS.shape[0] * routing.num_experts * routing.capacity)
    return {
        "load": routing.load,
        "gate": routing.gate_sums,
        "tokens": lambda: tf.reduce_sum(mask_GS),
        "slots": lambda: tf.constant(slots),
    }


def gate_metrics(gates_GSE: tf.Tensor, mask_GS: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the mean over real tokens of the entropy of their gates, in nats, float32.

    Args:
      gates_GSE: float32, gates that sum to 1 for each token.
    """
    entropy_GS = -tf.reduce_sum(tf.math.xlogy(gates_GSE, gates_GSE), -1)
    mean = tf.reduce_sum(entropy_GS * mask_GS) / tf.maximum(tf.reduce_sum(mask_GS), 1.0)
    return {ENTROPY: mean}
