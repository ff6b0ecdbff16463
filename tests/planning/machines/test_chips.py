# tests: wings/planning/machines/chips.py, wings/planning/machines/gpu_targets.py
"""Checks that figures of chips have sources and agree with each other and with pod totals."""

import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.wings.planning.machines import chips, compilers, topologies


@pytest.mark.parametrize("key", chips.CHIPS)
def test_figures_are_consistent_and_have_sources(key):
    chip = chips.get(key)
    assert chip.key == key
    assert all(chip.sources[field] for field in chip.sources)
    assert 0 < chip.usable_bytes <= chip.memory_bytes
    assert chip.peak_flops["bf16"] >= chip.peak_flops["f32"]
    # Matrix products of less than one FLOP per byte are always bound by memory.
    assert chip.peak("bfloat16") > chip.memory_bandwidth
    assert chip.torus_dimensions == len(chip.pod_shape)
    assert chip.links == 2 * chip.torus_dimensions or chip.kind != "tpu"
    if chip.price is not None:
        assert chip.price.source and chip.price.date and chip.price.region


@pytest.mark.parametrize(
    ("platform", "kind", "key"),
    [
        ("tpu", "TPU v3", "v3"),
        ("tpu", "TPU v5 lite", "v5e"),
        ("tpu", "TPU v5", "v5p"),
        ("tpu", "TPU v6 lite", "v6e"),
        ("tpu", "TPU7x", "tpu7x"),
        ("gpu", "NVIDIA H100 80GB HBM3", "h100"),
        ("gpu", "NVIDIA L4", "l4"),
        ("gpu", "NVIDIA L40", None),
        ("gpu", "NVIDIA L40S", "l40s"),
        ("gpu", "NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "a100"),
        ("gpu", "NVIDIA B200", "b200"),
        ("gpu", "NVIDIA GB200", "gb200"),
        ("gpu", "NVIDIA H20", "h20"),
        ("gpu", "NVIDIA GeForce GTX 1080", None),
        ("cpu", "cpu", None),
    ],
)
def test_figures_are_found_by_the_name_of_a_device(platform, kind, key):
    chip = chips.of_device(platform, kind)
    assert (chip and chip.key) == key


def test_the_usable_share_of_the_memory_is_explained():
    assert chips.get("v3").capacity_reason == (
        "a program may use 15.48 of the 16.00 GiB of a device (97%): the available memory that "
        f"libtpu {compilers.VERSION} reports when a program needs more"
    )
    h100 = chips.get("h100").capacity_reason
    assert "a program may use 59.33 of the 79.11 GiB of a device (75%): " in h100
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in h100


def test_the_environment_sets_the_share_of_a_gpus_memory(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    topology = topologies.get("gpu:h100:2x8")
    assert topology.chip.usable_bytes == int(0.9 * topology.chip.memory_bytes)
    assert topology.chip.capacity_reason.endswith("XLA_PYTHON_CLIENT_MEM_FRACTION=0.9")
    assert chips.get("v3") == chips.CHIPS["v3"]


@pytest.mark.parametrize("share", ["0", "1.5", "90%", ""])
def test_a_share_that_jax_refuses_is_refused(monkeypatch, share):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", share)
    with pytest.raises(UserError, match=f"MEM_FRACTION={share}: a share above 0"):
        chips.get("h100")


def test_per_device_figures_divide_the_chip_by_its_partitions():
    v3 = chips.get("v3")
    assert v3.partitions == 2
    assert v3.peak("bf16") * v3.partitions == 123e12
    assert v3.memory_bandwidth * v3.partitions == 900e9
    assert v3.memory_bytes * v3.partitions == 32 * 2**30


def test_pod_rates_match_published_figures():
    """The documentation also gives rates of complete pods."""
    v5e = chips.get("v5e")
    assert 2 * 16 * v5e.link_bandwidth == pytest.approx(1.6e12)
    assert 256 * v5e.links * v5e.link_bandwidth == pytest.approx(51.2e12)
    v4 = chips.get("v4")
    assert 2 * 16 * 16 * v4.link_bandwidth == pytest.approx(24e12, rel=0.07)
    v3 = chips.get("v3")
    assert 1024 * v3.links * v3.link_bandwidth == pytest.approx(340e12, rel=0.02)


def test_rates_of_a_rack_match_published_totals():
    """NVIDIA also gives rates of 72 GPUs; those of products are with sparsity."""
    rack = chips.get("gb200")
    assert rack.host_chips == 72
    assert 2 * 72 * rack.peak("f8e4m3fn") == 720e15 and 2 * 72 * rack.peak("bf16") == 360e15
    assert 72 * rack.memory_bandwidth == 576e12
    assert 2 * 72 * rack.link_bandwidth == pytest.approx(130e12, rel=0.01)
    assert 72 * chips.get("gb300").peak("f8e4m3fn") == 360e15


def test_float32_rate_depends_on_precision():
    v3 = chips.get("v3")
    assert v3.peak("float32") == v3.peak("bfloat16") == v3.peak("f32")
    assert v3.peak("float32", passes=6) == v3.peak("float32") / 6
    h100 = chips.get("h100")
    assert h100.peak("float32", passes=3) == 67e12
    assert h100.peak("bfloat16") == 989.5e12
    cpu = chips.get("cpu")
    assert cpu.peak("float32", passes=6) == cpu.peak("float32")


def test_dtypes_use_published_rates():
    v6e = chips.get("v6e")
    assert v6e.peak("int8") == v6e.peak("s8") == 2 * v6e.peak("bf16")
    assert v6e.peak("float8_e4m3fn") == v6e.peak("f8e5m2") == v6e.peak("bf16")
    # Neither chip has units for these types.
    assert chips.get("v3").peak("int8") == chips.get("v3").peak("bf16")
    assert chips.get("a100").peak("f8e4m3fn") == chips.get("a100").peak("bf16")


def test_unknown_chip_is_rejected():
    with pytest.raises(ValueError, match=r"`topology`: unknown chip 'h10'. Did you mean 'h100'"):
        chips.get("h10")
