"""Small dropless layers, and runs of them on one device and on many."""

import math

import numpy as np
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.moe.exchange import Exchange
from lingvo_gshard.layers.moe.routing import Assignment, TokenChoiceRouting
from lingvo_gshard.sharding import annotate, annotate_weights
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.functions.partition import partition
from tests.layers.moe.dispatch_names import dispatch_params

M, H, E = 4, 6, 4


def make(dispatch="dropless", experts=E, group_size=8, **values) -> MixtureOfExperts:
    params = MixtureOfExperts.params().set(
        model_dim=M,
        hidden_dim=H,
        num_experts=experts,
        group_size=group_size,
        dispatch=dispatch_params(dispatch),
    )
    for name, value in values.items():
        params.set_path(name.replace("__", "."), value)
    if dispatch != "dropless":
        params.router.capacity_factor = float(experts)
    return params.instantiate(path="moe")


def weights_of(layer) -> NestedMap:
    return layer.init(1).transform(
        lambda w: (
            w + 0.1 * np.sin(np.arange(w.shape.num_elements())).reshape(w.shape).astype(np.float32)
        )
    )


def both_ways(layer, theta, x, mask, training=False, seed=1) -> NestedMap:
    """Returns the output, metrics and all gradients."""
    sources = NestedMap(theta=theta, x=tf.convert_to_tensor(x))
    with (
        tf.GradientTape() as tape,
        context.scope(training=training, seed=tf.constant([seed, 0])) as scope,
    ):
        tape.watch(sources.flatten())
        y = layer.fprop(sources.theta, sources.x, mask)
        weights = np.cos(np.arange(math.prod(y.shape))).reshape(y.shape)
        total = tf.reduce_sum(y * tf.cast(weights, y.dtype))
    gradients = tape.gradient(total, sources.flatten(), unconnected_gradients="zero")
    metrics = NestedMap({name: value for name, (value, _) in scope.metrics.items()})
    return NestedMap(output=y, metrics=metrics, gradients=sources.pack(gradients))


def check_equal(one: NestedMap, other: NestedMap) -> None:
    for name in ("output", "gradients"):
        pairs = zip(tf.nest.flatten(one[name]), tf.nest.flatten(other[name]), strict=True)
        for actual, expected in pairs:
            assert_close(actual, expected, "order")


def on_devices(layer, mesh: str, strategy: str, with_gradient=True):
    """Returns a function (weights, x) that runs on the mesh.

    It returns the output, the metrics and, optionally, the gradients.
    """
    specs = layer.variable_specs()

    def run(theta, x):
        theta, x = annotate_weights(theta, specs), annotate(x, "BLM")
        found = both_ways(layer, theta, x, tf.ones(x.shape[:2], tf.int32))
        if not with_gradient:
            return found.output, found.metrics
        return found

    return partition(run, mesh, strategy)


def run_experts(
    dispatch, experts, theta, x_GSM, expert_KGS, gate_KGS, kept_KGS, **options
) -> tf.Tensor:
    """Returns what the dispatch of these Params computes for choices [K,G,S] of experts.

    The last argument are options of the exchange.
    """
    positions = tf.zeros(x_GSM.shape[:2], tf.int32)
    assignments = tuple(
        Assignment(
            tf.cast(e, tf.int32), positions, g, tf.convert_to_tensor(k), tf.cast(k, tf.float32)
        )
        for e, g, k in zip(expert_KGS, gate_KGS, kept_KGS, strict=True)
    )
    routing = TokenChoiceRouting(assignments, experts.p.num_experts, x_GSM.shape[1])
    x_GSM = tf.convert_to_tensor(x_GSM)
    exchange = Exchange.params().set(**options).instantiate(path="moe.exchange")
    return dispatch.instantiate(path="moe.dispatch").run(routing, x_GSM, experts, theta, exchange)
