"""Mixtures of experts in inference: experts compute every token sent to them."""

from __future__ import annotations

import math

from lingvo_gshard.core import NestedMap, known_sizes, tf
from lingvo_gshard.layers import Experts, Groups, MixtureOfExperts, load_metrics, token_context
from lingvo_gshard.sharding import current_partitioning
from lingvo_gshard.wings.inference.experts import chosen_experts, split_experts
from lingvo_gshard.wings.inference.layers.faces import decoding_weights, infer
from lingvo_gshard.wings.inference.stored_weights import restore


@decoding_weights.register(Experts)
def _(layer: Experts, theta: NestedMap) -> NestedMap:
    return chosen_experts.stored(layer, theta)


@decoding_weights.register(MixtureOfExperts)
def _(layer: MixtureOfExperts, theta: NestedMap) -> NestedMap:
    weights = NestedMap(theta)
    if layer.p.shared_hidden_dim:
        weights.shared = decoding_weights(layer.shared, theta.shared)
    if layer.router.capacity.tokens_choose:
        weights.experts = chosen_experts.prepare(layer.experts, theta.experts)
    else:
        weights.experts = decoding_weights(layer.experts, theta.experts)
    return weights


@infer.register(MixtureOfExperts)
def _(layer: MixtureOfExperts, theta: NestedMap, x_BLM: tf.Tensor, mask_BL: tf.Tensor) -> tf.Tensor:
    """Computes each token with the experts and gates of `fprop` without capacity.

    So if tokens choose their experts, a token's output does not depend on other tokens. If experts
    choose tokens, they choose among all tokens given, as in `fprop`.
    """
    batch, length, _ = known_sizes(x_BLM.shape)
    with token_context.override(keeps_all=True):
        if not layer.router.capacity.tokens_choose:
            groups = Groups.for_batch(batch, length, layer.p.group_size)
            theta = NestedMap(theta, experts=restore(theta.experts))
            return layer.run_groups(theta, x_BLM, mask_BL, groups)
        groups = Groups.for_batch(batch, length, _own_tokens(layer, batch * length))
        x_GSM, mask_GS = groups.split(x_BLM), tf.cast(tf.not_equal(mask_BL, 0), tf.float32)
        mask_GS, ids_GS = groups.split(mask_GS), layer.token_ids(x_BLM.shape, groups)
        with split_experts.of_groups(groups.count) as place, groups.ordered():
            x_GSM = place(x_GSM)
            routing = layer.router.fprop(theta.router, x_GSM, place(mask_GS), ids_GS)
    load_metrics.observe_gates(layer, routing, groups)
    routing, x_GSM = layer.gated(theta, routing, x_GSM)
    y_GSM = chosen_experts.run_routing(layer.experts, theta.experts, routing, x_GSM)
    return layer.finish(theta, x_BLM, mask_BL, groups.merge(y_GSM))


def _own_tokens(layer: MixtureOfExperts, tokens: int) -> int:
    """Returns the tokens of each device that splits them, which it routes as one group."""
    current = current_partitioning()
    if current is None:
        return tokens
    return math.ceil(tokens / current.parts(current.split("G", path=layer.path)[0]))
