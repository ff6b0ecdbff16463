# tests: wings/long_inputs/ring.py, wings/long_inputs/blockwise.py, sharding/strategies.py
"""Compares layers sharded over positions with one device, and checks their collectives."""

import functools
import re

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import Layer
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.stacks.transformer_layer import TransformerLayer
from lingvo_gshard.sharding import annotate, annotate_weights
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.functions.partition import Partitioned, partition
from lingvo_gshard.wings.long_inputs.blockwise import BlockwiseKernel
from lingvo_gshard.wings.long_inputs.ring import RingKernel

B, L, M, H, E = 4, 16, 8, 16, 4
SEED = (3, 4)
EVERYTHING = {
    "num_key_value_heads": 2,
    "window": 5,
    "logit_cap": 1.0,
    "qk_norm": True,
    "rotary_fraction": 1.0,
}
RING = {"kernel": RingKernel.params()}


def ring_of_blocks(block_size: int) -> dict:
    return {"kernel": RingKernel.params().set(block_size=block_size)}


def attention(is_causal: bool = True, **values) -> Params:
    p = SelfAttention.params().set(num_heads=4, head_dim=4, is_causal=is_causal)
    return p.set(model_dim=M, **values)


def layer_params(group_size: int = 0, **values) -> Params:
    """Returns the Params of a causal layer, with experts if there is a group size."""
    p = TransformerLayer.params().set(model_dim=M, self_attention=attention(**values))
    p.feed_forward.hidden_dim = H
    if group_size:
        p.feed_forward = MixtureOfExperts.params().set(
            hidden_dim=H, num_experts=E, group_size=group_size
        )
    return p


def inputs() -> NestedMap:
    """Returns packed rows, their padding, and a gradient of the output."""
    rng = np.random.default_rng(0)
    segments = np.ones((B, L), np.int32)
    segments[:2, 6:] = 2
    segments[1:, 13:] = 0
    x, d_y = rng.normal(size=(2, B, L, M)).astype(np.float32)
    return NestedMap(x=x, segments=segments, d_y=d_y)


def passes_of(layer: Layer):
    """Returns a function from (theta, inputs) to the output and all gradients."""
    specs = layer.variable_specs()
    attention = layer if isinstance(layer, SelfAttention) else layer.self_attention

    def run(theta: NestedMap, given: NestedMap) -> NestedMap:
        theta = annotate_weights(theta, specs)
        x, segments = annotate(given.x, "BLM"), annotate(given.segments, "BL")
        with context.scope(training=True, seed=tf.constant(SEED)), tf.GradientTape() as tape:
            sources = [x, *theta.flatten()]
            tape.watch(sources)
            mask = attention.mask(segments)
            y = layer.fprop(theta, x, mask if layer is attention else [mask])
            y = annotate(y, "BLM")
        d_x, *d_theta = tape.gradient(y, sources, annotate(given.d_y, "BLM"))
        d_theta = annotate_weights(theta.pack(map(tf.convert_to_tensor, d_theta)), specs)
        return NestedMap(y=y, d_x=annotate(d_x, "BLM"), d_theta=d_theta)

    return run


class Ran:
    """A layer on a mesh: compiles it, runs it, and compares it with one device."""

    def __init__(self, params: Params, mesh: str, strategy: str):
        layer = params.instantiate(path="layer")
        theta = layer.init(1).transform(np.asarray)
        self._compiled: Partitioned = partition(passes_of(layer), mesh, strategy)
        self._arguments = theta, inputs()
        self.found = self._compiled(*self._arguments)

    def check(self, unsharded: Params) -> None:
        """Checks that one device computes the same."""
        theta, given = self._arguments
        expected = passes_of(unsharded.instantiate(path="layer"))(
            theta.transform(tf.constant), given.transform(tf.constant)
        )
        for (path, one), other in zip(self.found.flatten_items(), expected.flatten(), strict=True):
            assert_close(one, other, "float32" if path == "y" else "order")

    def collectives(self, least_bytes: int = 0) -> list[hlo.CollectiveCall]:
        """Returns collectives of at least this many bytes, and checks for full replications."""
        executable = self._compiled.compile(*self._arguments)
        assert executable.full_replications() == []
        return [c for c in executable.collectives() if c.bytes >= least_bytes]


@functools.cache
def ring() -> Ran:
    return Ran(attention(**RING), "data=2,context=4", "data_context")


def test_ring_attention_equals_full_attention():
    ring().check(attention())


def test_ring_attention_permutes_keys_and_values_without_gathers():
    """Forward permutes keys, values and segments; backward also permutes their gradients home."""
    found = ring().collectives()
    assert hlo.count_by_kind(found) == {"collective-permute": 10, "all-reduce": 2}
    of_segments, of_keys = 4 * (B // 2) * (L // 4), 4 * (B // 2) * 4 * (L // 4) * 4
    sizes = [c.bytes for c in found if c.kind == "collective-permute"]
    assert sorted(sizes) == [of_segments] * 2 + [of_keys] * 8
    # The gradients of all weights, over one axis and then over the other.
    weights = 4 * 4 * M * 4 * 4
    assert [c.bytes for c in found if c.kind == "all-reduce"] == [weights] * 2


def test_ring_attention_with_all_options_and_sharded_heads():
    """Keys and values have fewer heads than queries."""
    ran = Ran(attention(**EVERYTHING, **ring_of_blocks(3)), "context=4,model=2", "context_tensor")
    ran.check(attention(**EVERYTHING))
    found = ran.collectives(least_bytes=4 * B * L + 1)
    kinds = hlo.count_by_kind(found)
    assert kinds["collective-permute"] == 8 and kinds.keys() == {"collective-permute", "all-reduce"}
    # One of two key heads; blocks of 3 pad 4 positions to 6.
    sizes = {c.bytes for c in found if c.kind == "collective-permute"}
    assert sizes == {4 * B * 1 * 6 * 4}


def test_gathered_attention_all_gathers_keys_and_values():
    mesh = "data=2,context=2,model=2"
    ran = Ran(attention(**EVERYTHING), mesh, "data_context_tensor")
    ran.check(attention(**EVERYTHING))
    found = ran.collectives(least_bytes=4 * (B // 2) * L + 1)
    # Keys and values, each of one of its two heads; their gradients are summed and cut.
    of_keys = 4 * (B // 2) * 1 * L * 4
    assert [c.bytes for c in found if c.kind == "all-gather"] == [of_keys] * 2
    assert {c.kind for c in found} == {"all-gather", "all-reduce"}
    assert 2 * of_keys in [c.bytes for c in found if c.kind == "all-reduce"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "exchange"),
    [
        ({}, RING),
        ({"window": 3, "is_causal": False}, RING),
        (EVERYTHING, ring_of_blocks(2)),
        ({"is_causal": False}, {}),
        (EVERYTHING, {"kernel": BlockwiseKernel.params().set(block_size=4)}),
    ],
)
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        ("context=8", "context"),
        ("data=4,context=2", "data_context"),
        ("context=2,model=4", "context_tensor"),
        ("data=2,context=2,model=2", "data_context_sequence_tensor"),
        ("model=8", "sequence"),
        ("data=2,model=4", "data_sequence_tensor"),
    ],
)
def test_every_strategy_on_every_mesh(mesh, strategy, values, exchange):
    Ran(attention(**values, **exchange), mesh, strategy).check(attention(**values))


def test_uneven_sequence_shards_are_rejected():
    layer = attention(**RING).instantiate(path="layer")

    def run(theta, x, segments):
        return layer.fprop(theta, x, layer.mask(segments))

    theta, given = layer.init(1).transform(np.asarray), inputs()
    message = "layer.kernel: a ring of 8 devices needs equal parts of rows, and L is 12"
    with pytest.raises(ValueError, match=message):
        partition(run, "context=8", "context")(theta, given.x[:, :12], given.segments[:, :12])


def test_sequence_parallelism_replaces_all_reduces():
    """Four all-gathers and four reduce-scatters replace four all-reduces of activations.

    XLA on CPU uses an all-reduce instead of a reduce-scatter.
    """
    ran = Ran(layer_params(), "data=2,model=4", "data_sequence_tensor")
    ran.check(layer_params())
    activations = 4 * (B // 2) * L * M
    found = ran.collectives(least_bytes=activations)
    gathered = [c for c in found if c.kind == "all-gather"]
    assert [c.bytes for c in gathered] == [activations] * 4
    summed = [c for c in found if c.kind == "all-reduce"]
    products = re.findall(r"einsum_\d/Einsum", " ".join(c.op_name for c in summed))
    assert len(products) == 4 and len(gathered) + len(summed) == len(found)


def test_groups_within_one_device_need_no_resharding():
    """If each shard of a row is one group, only the experts' all-to-alls communicate.

    Random numbers of a group do not depend on its device, so training matches too.
    """
    ran = Ran(layer_params(4), "data=2,context=4", "expert_context")
    ran.check(layer_params(4))
    of_experts = [c for c in ran.collectives() if "feed_forward/" in c.op_name]
    found = hlo.count_by_kind([c for c in of_experts if c.kind != "all-reduce"])
    assert found == {"all-to-all": 4}


@pytest.mark.slow
@pytest.mark.parametrize(("group_size", "mesh"), [(8, "data=2,context=4"), (3, "data=2,context=2")])
def test_groups_that_cross_devices(group_size, mesh):
    """Rows are gathered and split again; the last group may be padded."""
    Ran(layer_params(group_size), mesh, "expert_context").check(layer_params(group_size))


@pytest.mark.slow
def test_experts_under_sequence_parallelism():
    ran = Ran(layer_params(4), "data=2,model=4", "expert_sequence_tensor")
    ran.check(layer_params(4))
    assert hlo.count_by_kind(ran.collectives())["all-to-all"] == 4
