# tests: layers/moe/exchange.py
"""Checks dtype, bytes and groups of the all-to-alls of a mixture of experts in compiled HLO."""

import collections
import functools

import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.autodiff.remat_unit import rematerialized
from lingvo_gshard.core.layer import scope_name
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.sharding import annotate, annotate_weights
from lingvo_gshard.wings.functions.partition import partition

B, L, M, H, E = 8, 16, 32, 64, 8
DEVICES = 8
# Rows of the buffers on one device: 2 slots for each token.
ROWS = B * 2 * L // DEVICES
ONE_AXIS = ("data=8", "expert")
FOLDED = ("data=4,model=2", "folded_tensor")
HOSTS = ("host=2,data=4", "activations: B,G->host,data | E->host,data")

SHARDY = pytest.param("shardy", marks=pytest.mark.slow)
each_partitioner = pytest.mark.parametrize("partitioner", ["gspmd", SHARDY])


@functools.cache
def compiled(
    layout: tuple[str, str] = ONE_AXIS, partitioner: str = "gspmd", policy: str = "", **exchange
) -> Executable:
    """Compiles a layer's output and all gradients; with a policy, as a remat unit."""
    params = MixtureOfExperts.params().set(model_dim=M, hidden_dim=H, num_experts=E, group_size=L)
    params.exchange.set(**exchange)
    layer = params.instantiate(path="moe")
    specs = layer.variable_specs()

    def output(theta, x_BLM):
        segments = tf.ones([B, L], tf.int32)
        if not policy:
            return layer.fprop(theta, x_BLM, segments)

        def unit(x_BLM, *weights):
            return layer.fprop(theta.pack(weights), x_BLM, segments)

        return rematerialized(unit, policy, [x_BLM], theta.flatten())

    def run(theta, x_BLM, d_y):
        theta, x_BLM = annotate_weights(theta, specs), annotate(x_BLM, "BLM")
        with context.scope(training=False), tf.GradientTape() as tape:
            tape.watch((theta, x_BLM))
            y = annotate(output(theta, x_BLM), "BLM")
        d_theta, d_x = tape.gradient(y, (theta, x_BLM), annotate(d_y, "BLM"))
        return y, annotate_weights(d_theta, specs), annotate(d_x, "BLM")

    theta = specs.transform(lambda spec: tf.TensorSpec(spec.shape, spec.dtype))
    x = tf.TensorSpec((B, L, M))
    return partition(run, *layout, partitioner=partitioner).compile(theta, x, x)


def moved(*arguments, **options) -> collections.Counter:
    """Counts all-to-alls by (axis, dtype, bytes, phase), and checks the other collectives."""
    executable = compiled(*arguments, **options)
    scopes = frozenset({scope_name("moe"), "moe/router", "moe/experts"})
    calls = executable.collectives(scopes)
    others = [call for call in calls if call.kind != "all-to-all"]
    # The gradient of the router.
    assert [(call.kind, call.bytes) for call in others] == [("all-reduce", 4 * M * E)]
    assert executable.full_replications() == []
    assert {call.layer for call in calls if call.kind == "all-to-all"} == {"moe"}
    return collections.Counter(
        (",".join(call.axes), call.dtype, call.bytes, call.phase)
        for call in calls
        if call.kind == "all-to-all"
    )


def both_ways(counts: dict) -> dict:
    """Returns (axis, dtype, bytes) for the forward and the backward pass."""
    return {(*key, p): n for key, n in counts.items() for p in ("forward", "backward")}


@each_partitioner
def test_int8_exchange_sends_scales(partitioner):
    found = moved(ONE_AXIS, partitioner, precision="int8")
    assert found == both_ways({("data", "int8", ROWS * M): 2, ("data", "float32", ROWS * 4): 2})


def test_fp8_exchange_sends_8_bits_to_experts_and_16_bits_back():
    """XLA sends bfloat16, also that of scales, as float32 on CPUs."""
    found = moved(ONE_AXIS, precision="fp8")
    returned = ("data", "float32", ROWS * M * 4)
    assert found == both_ways(
        {("data", "uint8", ROWS * M): 1, ("data", "float32", ROWS * 4): 1, returned: 1}
    )


def test_bfloat16_exchange_is_one_all_to_all_each_way():
    """XLA sends bfloat16 as float32 on CPUs, which have no native bfloat16."""
    assert moved(precision="bfloat16") == both_ways({("data", "float32", ROWS * M * 4): 2})


@each_partitioner
def test_chunked_exchange_has_one_smaller_all_to_all_per_chunk(partitioner):
    found = moved(ONE_AXIS, partitioner, chunks=4)
    assert found == both_ways({("data", "float32", ROWS * M): 2 * 4})


@each_partitioner
def test_hierarchical_exchange_has_one_all_to_all_per_axis(partitioner):
    """Each moves as many bytes as the direct exchange over all devices."""
    size = ROWS * M * 4
    found = moved(HOSTS, partitioner, hierarchical=True)
    assert found == both_ways({("data", "float32", size): 2, ("host", "float32", size): 2})


@pytest.mark.parametrize(
    ("policy", "recomputed"),
    [("full", 2), ("exchanges", 0), ("products", 0), ("products_but_hidden", 0)],
)
@pytest.mark.parametrize("precision", ["", pytest.param("int8", marks=pytest.mark.slow)])
def test_policies_that_save_rows_send_rows_once(policy, recomputed, precision):
    calls = compiled(policy=policy, precision=precision).collectives(frozenset({"moe"}))
    sent = collections.Counter(
        call.phase for call in calls if call.kind == "all-to-all" and call.bytes >= ROWS * M
    )
    expected = {"forward": 2, "backward": 2, "rematerialized": recomputed}
    assert sent == {phase: n for phase, n in expected.items() if n}


@pytest.mark.slow
def test_direct_exchange_over_two_axes_is_one_all_to_all():
    assert moved(HOSTS) == both_ways({("host,data", "float32", ROWS * M * 4): 2})


def test_folded_experts_send_the_tokens_of_each_device_once():
    """Devices along `model` have other tokens, so that each sends half as many rows."""
    executable = compiled(FOLDED)
    found = collections.Counter(
        (call.kind, ",".join(call.axes), call.bytes, call.phase)
        for call in executable.collectives(frozenset({scope_name("moe"), "moe/router"}))
    )
    # Two slots for each of the B * L / 8 tokens of a device.
    rows, tokens = ROWS * M * 4, B * L // 4 * M * 4
    assert found == {
        ("all-to-all", "data,model", rows, "forward"): 2,
        ("all-to-all", "data,model", rows, "backward"): 2,
        # Attention, which is split otherwise, needs all tokens of a row.
        ("all-gather", "model", tokens, "forward"): 1,
        ("all-gather", "model", tokens, "other"): 1,
        ("all-reduce", "data,model", 4 * M * E, "backward"): 1,
    }


@each_partitioner
def test_all_exchange_options_together(partitioner):
    found = moved(HOSTS, partitioner, precision="int8", chunks=2, hierarchical=True)
    assert found == both_ways(
        {
            (axis, dtype, size // 2): 4
            for axis in ("host", "data")
            for dtype, size in (("int8", ROWS * M), ("float32", ROWS * 4))
        }
    )
