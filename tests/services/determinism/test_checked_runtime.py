# tests: wings/services/determinism.py
"""Tests that a flipped bit in a weight is found, with its device and tensor."""

import jax
import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.services import determinism
from lingvo_gshard.wings.services.determinism import CheckedRuntime, WrongResultError
from tests import tiny
from tests.services.determinism.flipped import FlippingRuntime, flipped

WEIGHT = "theta.hidden.w"


@pytest.fixture(scope="module")
def trainer():
    params = tiny.experiment_params()
    return params.step.instantiate(params.task, params.run.steps)


def runtime_of(trainer, strategy):
    if strategy is None:
        return SingleDeviceRuntime(trainer)
    return SpmdRuntime(trainer, Partitioning.make("data=4", strategy), devices_for(4))


def run(runtime, steps=4):
    runtime.init_state()
    return [runtime.train_step(tiny.make_batch(1, index)).read() for index in range(steps)]


def digests(runtime):
    return runtime.state().transform(lambda value: np.asarray(value).tobytes()).flatten()


@pytest.mark.parametrize(
    "strategy",
    [None, *(pytest.param(strategy, marks=pytest.mark.slow) for strategy in ("data", "fsdp"))],
)
def test_computing_steps_twice_changes_nothing(trainer, strategy):
    plain, checked = runtime_of(trainer, strategy), runtime_of(trainer, strategy)
    rows = run(plain)
    twice = CheckedRuntime(checked, 2)
    assert run(twice) == rows
    assert digests(checked) == digests(plain)
    assert twice.step == 4
    (message,) = [text for text in twice.pop_messages() if "computed twice" in text]
    assert message.startswith("step 2: computed twice in ") and "again every 2 steps" in message


@pytest.mark.slow
def test_a_bit_that_flips_in_a_computation_is_found(trainer):
    """Device 2 computes one bit of its part of a weight wrong when it computes step 4 again."""
    split = "theta.output.w"
    runtime = FlippingRuntime(runtime_of(trainer, "fsdp"), split, device=2, call=6)
    with pytest.raises(WrongResultError) as caught:
        run(CheckedRuntime(runtime, 2))
    assert str(caught.value).startswith(
        "step 4: it was computed twice from the same state, and differs on CPU device 2 (process "
        f"0): {split}. Take the machine of this device out of use"
    )


def test_a_bit_that_flips_on_one_device_alone_is_found(trainer):
    runtime = FlippingRuntime(runtime_of(trainer, None), WEIGHT, device=0, call=5)
    with pytest.raises(WrongResultError, match=rf"step 4: .* differs on the device: {WEIGHT}\. T"):
        run(CheckedRuntime(runtime, 2))


@pytest.mark.slow
def test_a_copy_that_differs_between_devices_is_found(trainer):
    """A bit flips in the memory of device 3 after step 2; all devices hold the whole weight."""
    runtime = CheckedRuntime(runtime_of(trainer, "data"), 2)
    run(runtime, steps=2)
    state = NestedMap(runtime.state())
    state.theta.hidden.w = flipped(state.theta.hidden.w, device=3)
    runtime.load_state(state)
    runtime.train_step(tiny.make_batch(1, 2))
    with pytest.raises(WrongResultError) as caught:
        runtime.train_step(tiny.make_batch(1, 3))
    message = str(caught.value)
    assert "step 4: devices hold different copies of a tensor before it: CPU device 3" in message
    assert WEIGHT in message and "device 1" not in message


def test_digests_differ_for_any_single_bit():
    generator = np.random.default_rng(3)
    for dtype in ("float32", "bfloat16", "int8", "int32", "bool"):
        array = jax.numpy.asarray(generator.integers(0, 2, (5, 3))).astype(dtype)
        on_host = np.asarray(array)
        found = {determinism._on_host(on_host)}
        assert int(determinism._digest(array)) in found
        bits = on_host.view(np.uint8).reshape(-1)
        for at in range(bits.size):
            changed = bits.copy()
            changed[at] ^= 1
            found.add(determinism._on_host(changed.view(on_host.dtype).reshape(5, 3)))
        assert len(found) == bits.size + 1


def test_words_name_devices_and_count_the_rest():
    rows = [determinism.ShardDifference(f"t{k}", f"d{k % 6}") for k in range(30)]
    text = determinism.words(rows, 8)
    assert text == (
        "d0: t0, t6, t12 and 2 more tensors; d1: t1, t7, t13 and 2 more tensors; "
        "d2: t2, t8, t14 and 2 more tensors; d3: t3, t9, t15 and 2 more tensors; "
        "and 2 more devices"
    )
    assert determinism.words(rows, 6).endswith("a collective may have passed a wrong value on")
