"""Which devices train in 8 bits, what is said of it, and the state of such a training."""

import numpy as np
import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.runtime.compile_options import Traits, chosen
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training.step import precision
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.low_precision import devices
from lingvo_gshard.wings.planning.machines.chips import CHIPS
from tests.runtime import tiny_translation

FP8, BLOCKS, MXFP8, NVFP4, INT8, BFLOAT16 = map(
    precision.get, ("fp8", "fp8_blocks", "mxfp8", "nvfp4", "int8", "bfloat16")
)
PLATFORMS = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}
DEVICES = [
    *((chip.key, kind) for chip in CHIPS.values() for kind in chip.device_kinds),
    *((chip.key, chip.name) for chip in CHIPS.values() if chip.kind != "cpu"),
    ("v5e", "TPU v5 lite"),
    ("v6e", "TPU v6 lite"),
    ("tpu7x", "TPU7x"),
    ("a100", "NVIDIA A100-SXM4-80GB"),
    ("h100", "NVIDIA H100 80GB HBM3"),
    ("l4", "NVIDIA L4"),
]


@pytest.mark.parametrize("precision", [FP8, INT8], ids=lambda precision: precision.name)
@pytest.mark.parametrize(("key", "kind"), DEVICES)
def test_devices_whose_products_are_no_faster_are_refused(key, kind, precision):
    chip, name = CHIPS[key], precision.name
    platform = PLATFORMS[chip.kind]
    is_faster = chip.peak_flops.get(name, 0) > chip.peak_flops["bf16"]
    if is_faster and (name, chip.kind) != ("int8", "gpu"):
        devices.check_name(precision, platform, kind)
    else:
        with pytest.raises(UserError, match=rf"step\.precision is '{name}', but products are no"):
            devices.check_name(precision, platform, kind)
    devices.check_name(BFLOAT16, platform, kind)
    if chip.kind == "gpu" and "fp8" not in chip.peak_flops:
        with pytest.raises(UserError, match="has no FP8, in which kernels multiply blocks"):
            devices.check_name(BLOCKS, platform, kind)
    else:
        devices.check_name(BLOCKS, platform, kind)


@pytest.mark.parametrize(("key", "kind"), DEVICES)
def test_blocks_of_32_are_for_blackwell(key, kind):
    chip = CHIPS[key]
    if chip.kind == "cpu" or key in ("b200", "b300", "gb200", "gb300"):
        devices.check_name(MXFP8, PLATFORMS[chip.kind], kind)
    else:
        with pytest.raises(UserError, match=r"step\.precision is 'mxfp8', but products are no"):
            devices.check_name(MXFP8, PLATFORMS[chip.kind], kind)


@pytest.mark.parametrize(
    ("precision", "platform", "kind", "nearest"),
    [
        (FP8, "tpu", "TPU v5 lite", "int8"),
        (INT8, "tpu", "TPU7x", "fp8"),
        (INT8, "cuda", "NVIDIA H100 80GB HBM3", "fp8"),
        (FP8, "tpu", "TPU v4", "bfloat16"),
        (INT8, "cuda", "NVIDIA A100-SXM4-80GB", "bfloat16"),
    ],
)
def test_a_refusal_names_what_is_faster(precision, platform, kind, nearest):
    with pytest.raises(UserError, match=f"Set step.precision = '{nearest}'"):
        devices.check_name(precision, platform, kind)


def test_the_compute_capability_of_a_gpu_decides():
    devices.check_name(FP8, "cuda", "a GPU that jax names otherwise", "8.9")
    devices.check_name(MXFP8, "cuda", "a GPU that jax names otherwise", "10.0")
    with pytest.raises(UserError, match="no faster in it than in bfloat16 on NVIDIA GeForce RTX"):
        devices.check_name(FP8, "cuda", "NVIDIA GeForce RTX 3090", "8.6")
    with pytest.raises(UserError, match="Set step.precision = 'fp8'"):
        devices.check_name(MXFP8, "cuda", "NVIDIA GH200 480GB", "9.0")


def test_simulated_products_are_named():
    fp8, blocks, int8, bfloat16 = (
        tiny_translation.trainer(precision=each)
        for each in ("fp8", "fp8_blocks", "int8", "bfloat16")
    )
    for each in (fp8, int8):
        assert "no products in 8 bits are known on cpu" in each.device_notes("cpu")[0]
    assert "a scale for each block" in blocks.device_notes("cuda")[0]
    dropless = {"moe.dispatch": DroplessDispatch.params()}
    blocks = tiny_translation.trainer(stack_values=dropless, precision="fp8_blocks")
    assert "but for those of dropless experts" in blocks.device_notes("cuda")[0]
    assert "dropless" not in blocks.device_notes("tpu")[0]
    blocks = tiny_translation.trainer(precision="mxfp8")
    assert not blocks.device_notes("cuda")
    assert "runtime spmd" in blocks.device_notes("cuda", has_kernels=False)[0]
    assert not fp8.device_notes("cuda") and not bfloat16.device_notes("cpu")
    narrow = tiny_translation.trainer(precision="nvfp4")
    assert "4 bits on B200 and later GPUs" in narrow.device_notes("cuda")[0]
    for platform, reason in (("tpu", "no TPU has products in 4 bits"), ("cpu", "known on cpu")):
        assert "'nvfp4' is simulated" in narrow.device_notes(platform)[0]
        assert reason in narrow.device_notes(platform)[0]
    assert "runtime spmd" in narrow.device_notes("cuda", has_kernels=False)[0]


@pytest.mark.parametrize(("key", "kind"), DEVICES)
def test_nvfp4_is_simulated_where_there_are_no_products_in_4_bits(key, kind):
    devices.check_name(NVFP4, PLATFORMS[CHIPS[key].kind], kind)
    assert ("fp4" in CHIPS[key].peak_flops) == (key in ("b200", "b300", "gb200", "gb300"))


def test_runtimes_say_that_they_simulate():
    trainer = tiny_translation.trainer(precision="fp8")
    split = SpmdRuntime(trainer, Partitioning.make("data=2", "data"), devices_for(2))
    for runtime in (SingleDeviceRuntime(trainer), split):
        assert any("is simulated" in message for message in runtime.pop_messages())


def test_products_are_left_to_cublaslt_in_fp8_alone():
    name = "xla_gpu_enable_triton_gemm"
    for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA B200"):
        assert chosen("cuda", kind, environment={}, traits=Traits("fp8"))[name] == "False"
        for other in ("", "bfloat16", "fp8_blocks", "mxfp8", "int8"):
            assert name not in chosen("cuda", kind, environment={}, traits=Traits(other))


@pytest.mark.parametrize("name", ["fp8", "fp8_blocks", "mxfp8", "nvfp4", "int8"])
@pytest.mark.slow
def test_state_is_that_of_bfloat16_and_goes_on_to_the_bit(name):
    """A run in fp8 needs no state of its own, so that it may also go on in bfloat16."""
    trainer = tiny_translation.trainer(precision=name)
    narrow = tiny_translation.trainer(precision="bfloat16")
    assert trainer.state_specs() == narrow.state_specs()
    one, other = SingleDeviceRuntime(trainer), SingleDeviceRuntime(trainer)
    one.init_state()
    for step in range(2):
        one.train_step(tiny_translation.batch(step))
    other.load_state(one.state())
    for step in range(2, 4):
        batch = tiny_translation.batch(step)
        first, second = (runtime.train_step(batch).read()["loss"] for runtime in (one, other))
        assert np.isfinite(first) and first == second
    for left, right in zip(one.state().flatten(), other.state().flatten(), strict=True):
        np.testing.assert_array_equal(left, right)
