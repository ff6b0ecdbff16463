"""Reports on a routing: losses, metrics of expert loads, and sums of watched routers."""

from __future__ import annotations

from collections.abc import Callable

from lingvo_gshard.core import context
from lingvo_gshard.core.context import Metric
from lingvo_gshard.core.layer import Layer
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.token_kinds import WatchedKinds
from lingvo_gshard.layers import token_context
from lingvo_gshard.layers.moe.groups import Groups
from lingvo_gshard.layers.moe.routing import Routing

# Names of the metric and of the loss of a routing that watched routers report.
ENTROPY = "router_entropy"
BALANCE_LOSS = "auxiliary_loss"
# Names the gate of each expert for each token, [B,L,E], to observers.
TOKEN_GATES = "token_gates"
# At most so many choices by part of the groups and by expert are counted.
_MOST_COUNTS = 4096


def report(layer: Layer, routing: Routing, mask_GS: tf.Tensor, groups: Groups) -> None:
    """Reports losses, metrics and observations of a routing under the path of its layer.

    Args:
      layer: the mixture of experts.
      routing: the routing of one batch.
      mask_GS: float32, 0 at padding.
      groups: the groups that were routed.
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
    now = token_context.current()
    if now.watched is not None:
        kinds_GS = None if now.kinds is None else groups.split(now.kinds)
        for name, value in watched_sums(routing, mask_GS, kinds_GS, now.watched, groups).items():
            context.current().add_sum(f"{layer.path}/{name}", value)
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

    Args:
      routing: the routing of one batch.
      mask_GS: float32, 0 at padding.
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

    Args:
      routing: the routing of one batch.
      mask_GS: float32, 0 at padding.
    """
    slots = float(mask_GS.shape[0] * routing.num_experts * routing.capacity)
    return {
        "load": routing.load,
        "gate": routing.gate_sums,
        "tokens": lambda: tf.reduce_sum(mask_GS),
        "slots": lambda: tf.constant(slots),
    }


def watched_sums(
    routing: Routing,
    mask_GS: tf.Tensor,
    kinds_GS: tf.Tensor | None,
    kinds: WatchedKinds,
    groups: Groups,
) -> dict[str, tf.Tensor]:
    """Returns float32 tensors that describe a routing and can be summed over micro-batches.

    choices        [E]: choices of each expert, before capacity
    kept           [E]: tokens that each expert computes
    tokens         [3]: real tokens, requests, and requests that are met (`Routing.requests`)
    batches        1
    groups         [3]: groups, their tokens with padding, and their capacity slots
    positions      [S]: requests by position in the experts' buffers, unless experts choose tokens
    by_part        [parts, E]: choices by equal parts of the groups, in the order of the rows
    entropy        sum over tokens of the entropy of their gates, if the router has gates over all E
    balance        the load-balancing loss, if the router has one
    by_language    [languages, E]: choices by the language of the token, if it is known
    by_class       [classes, E]: choices by the class of the token, if it is known

    Args:
      routing: the routing of one batch.
      mask_GS: float32, 0 at padding.
      kinds_GS: int32, the kind of each token; None if it is unknown.
      kinds: the numbers of the kinds.
      groups: the groups that were routed.
    """
    tokens = tf.reduce_sum(mask_GS)
    requests, met = routing.requests(mask_GS)
    sums = {
        "choices": routing.choices(),
        "kept": routing.load(),
        "tokens": tf.stack([tokens, requests, met]),
        "batches": tf.ones([]),
        "groups": tf.constant(
            [1.0, groups.size, routing.num_experts * routing.capacity], tf.float32
        )
        * groups.count,
        "by_part": _by_part(groups.in_order(routing.choices_by_group())),
    }
    positions_S = routing.requests_by_position()
    if positions_S is not None:
        sums["positions"] = positions_S
    if ENTROPY in routing.metrics:
        sums["entropy"] = routing.metrics[ENTROPY] * tokens
    if BALANCE_LOSS in routing.losses:
        sums["balance"] = routing.losses[BALANCE_LOSS].value
    if kinds_GS is not None and kinds.languages:
        language_GS = kinds_GS // kinds.classes
        sums["by_language"] = routing.choices_by(language_GS, kinds.languages)
    if kinds_GS is not None:
        sums["by_class"] = routing.choices_by(kinds_GS % kinds.classes, kinds.classes)
    return sums


def _by_part(choices_GE: tf.Tensor) -> tf.Tensor:
    """Returns the sums over equal parts of the groups, as many parts as may be counted."""
    count, num_experts = choices_GE.shape.as_list()
    most = max(_MOST_COUNTS // num_experts, 1)
    parts = next(n for n in range(min(count, most), 0, -1) if count % n == 0)
    return tf.reduce_sum(tf.reshape(choices_GE, [parts, count // parts, num_experts]), 1)


def gate_entropy(gates_GSE: tf.Tensor, mask_GS: tf.Tensor) -> tf.Tensor:
    """Returns the mean over real tokens of the entropy of their gates, in nats, float32."""
    entropy_GS = -tf.reduce_sum(tf.math.xlogy(gates_GSE, gates_GSE), -1)
    return tf.reduce_sum(entropy_GS * mask_GS) / tf.maximum(tf.reduce_sum(mask_GS), 1.0)


def gate_metrics(gates_GSE: tf.Tensor, mask_GS: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the metrics of a routing that has gates over all experts.

    Args:
      gates_GSE: float32, gates that sum to 1 for each token.
      mask_GS: float32, 0 at padding.
    """
    return {ENTROPY: gate_entropy(gates_GSE, mask_GS)}
