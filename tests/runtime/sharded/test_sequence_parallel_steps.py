# tests: wings/long_inputs/ring.py, wings/long_inputs/blockwise.py, sharding/strategies.py
"""Checks that steps sharded over positions equal one device and need less memory."""

import functools

import pytest

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.long_inputs.blockwise import BlockwiseKernel
from lingvo_gshard.wings.long_inputs.ring import RingKernel
from tests.layers.stacks.executions import loop
from tests.runtime import tiny_translation, trainings
from tests.runtime.sharded.causal_gradients import compiled, temporaries

pytestmark = pytest.mark.slow

STEPS = 2
ATTENTIONS = ("self_attention", "cross_attention")


def kernels(kernel: Params) -> dict:
    return {f"layer.{attention}.kernel": kernel for attention in ATTENTIONS}


RING = kernels(RingKernel.params())
IN_BLOCKS = kernels(RingKernel.params().set(block_size=2))
ONE_DENSE_LAYER = {"num_layers": 1, "moe_every": 0}
REPEATED = {"execution": loop("products")}


@functools.cache
def trained_locally(values: tuple, is_looped: bool, trainer_values: tuple) -> tuple:
    """Returns the initial state and the metrics of each step."""
    execution = REPEATED if is_looped else {}
    made = trainer({**dict(values), **execution}, dict(trainer_values))
    runtime = trainings.on_one_device(made)
    state = runtime.state()
    return state, trainings.train(runtime, STEPS)


def trainer(values: dict, trainer_values: dict):
    return tiny_translation.trainer(group_size=3, stack_values=values, **trainer_values)


@pytest.mark.parametrize(
    ("strategy", "mesh", "values", "trainer_values"),
    [
        ("data_context", "data=2,context=4", ONE_DENSE_LAYER, {}),
        ("expert_context", "data=2,context=4", {}, {}),
        ("expert_context", "data=2,context=4", RING, {}),
        ("expert_sequence_tensor", "data=2,model=4", {}, {}),
        ("expert_context_sequence_tensor", "data=2,context=2,model=2", IN_BLOCKS, {}),
        ("expert_context_fsdp", "data=2,fsdp=2,context=2", RING, {}),
        ("context_tensor", "context=2,model=4", RING, {}),
        ("context_data_zero1", "data=2,context=4", RING, {}),
        ("expert_context", "data=2,context=4", {**RING, **REPEATED}, {"micro_batches": 2}),
        ("expert_sequence_tensor", "data=2,model=4", REPEATED, {"micro_batches": 2}),
    ],
)
def test_trains_as_on_one_device(strategy, mesh, values, trainer_values):
    # Kernels all compute the same; Params cannot be keys of a cache.
    sizes = tuple((name, v) for name, v in values.items() if not isinstance(v, Params))
    is_looped = "execution" in values
    state, expected = trained_locally(sizes, is_looped, tuple(trainer_values.items()))
    runtime = trainings.on_mesh(trainer(values, trainer_values), mesh, strategy, state)
    found = trainings.train(runtime, STEPS)
    trainings.assert_same_metrics(found, expected, lambda name: 1e-5 if "loss" in name else 1e-4)
    assert runtime.executable().full_replications() == []


@pytest.mark.parametrize(
    ("values", "share"),
    [
        # Queries by all keys: half of the former.
        ({}, 0.6),
        # Queries by keys of one part each: up to a fourth.
        ({"kernel": RingKernel}, 0.6),
        # All keys stay.
        ({"kernel": BlockwiseKernel, "block_size": 128}, 0.7),
        ({"kernel": RingKernel, "block_size": 128}, 0.6),
    ],
)
def test_activation_memory_falls_with_the_number_of_devices(values, share):
    found = [temporaries(devices, **values) for devices in (1, 2, 4, 8)]
    for fewer, more in zip(found, found[1:], strict=False):
        assert more < share * fewer, found


def test_ring_attention_needs_less_memory_than_gathered_keys():
    assert temporaries(8, kernel=RingKernel) < temporaries(8) / 3


def test_sequence_parallelism_needs_less_memory_than_tensor_parallelism():
    strategies = ("tensor", "sequence_tensor")
    both = [temporaries(4, s, "model", BlockwiseKernel, 128) for s in strategies]
    # Most of one layer's memory is attention, which both strategies shard.
    assert both[1] < 0.97 * both[0]


def test_collective_count_does_not_depend_on_the_number_of_devices():
    kinds = [hlo.count_by_kind(compiled(n, kernel=RingKernel).collectives()) for n in (4, 8)]
    assert kinds[0] == kinds[1] == {"collective-permute": 10, "all-reduce": 1}
