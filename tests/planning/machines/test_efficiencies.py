"""Checks efficiencies against the measurements behind them."""

import numpy as np
import pytest

from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.hlo.operations import Collective, FusedAttention, Operation
from lingvo_gshard.wings.planning import roofline
from lingvo_gshard.wings.planning.machines import chips, efficiencies, interconnect, topologies

SETS = efficiencies.MEASURED
WITHIN_HOSTS = (*SETS["nccl_a100"], *SETS["nccl_h100"], *SETS["nccl_b200"])
RAGGED = (*SETS["ragged"], *SETS["ragged_in_small_groups"])
MEASURED = (
    *SETS["figure_9"],
    *SETS["ironwood"],
    *WITHIN_HOSTS,
    *efficiencies.PAIRS.values(),
)
NAMES = [f"{p.topology}-{p.kind}-{p.devices}-{p.bytes:.0f}" for p in MEASURED]


def operation(call: Collective) -> Operation:
    return Operation("x", call.kind, "layer", "forward", collective=call)


@pytest.mark.parametrize("point", MEASURED, ids=NAMES)
def test_no_measurement_is_faster_than_the_bound(point):
    assert 0.03 < point.efficiency < 1
    assert "http" in point.source


def test_figure_9_has_all_measured_points():
    assert len(SETS["figure_9"]) == 24
    (point,) = [
        p
        for p in SETS["figure_9"]
        if (p.kind, p.devices, p.bytes) == ("all-to-all", 512, 32 * 2**20)
    ]
    assert point.seconds == pytest.approx(5078e-6)


def test_figure_9_all_to_alls_have_similar_efficiencies():
    found = [p.efficiency for p in SETS["figure_9"] if p.kind == "all-to-all"]
    assert max(found) / min(found) < 1.4


def test_measurements_are_reproduced_and_interpolated():
    v3 = chips.get("v3")
    for point in SETS["figure_9"]:
        found = efficiencies.collective_efficiency(point.kind, point.bytes, point.devices, v3)
        assert found.value == pytest.approx(point.efficiency)
        assert found.source == point.source
    at_8, at_32 = (
        efficiencies.collective_efficiency("all-to-all", mib * 2**20, 128, v3).value
        for mib in (8, 32)
    )
    between = efficiencies.collective_efficiency("all-to-all", 16 * 2**20, 128, v3).value
    assert between == pytest.approx((at_8 + at_32) / 2)
    assert efficiencies.collective_efficiency("all-to-all", 1, 128, v3).value == at_8
    assert efficiencies.collective_efficiency("all-to-all", 2**40, 128, v3).value == at_32


def test_all_to_all_time_grows_from_128_to_2048_cores_as_published():
    v3 = chips.get("v3")
    seconds = []
    for name in ("v3:8x8", "v3:32x32"):
        topology = topologies.get(name)
        mesh = Mesh((("all", topology.devices),))
        call = Collective("all-to-all", ("all",), topology.devices, "float32", 8 * 2**20)
        share = efficiencies.collective_efficiency(call.kind, call.bytes, call.group_size, v3)
        seconds.append(interconnect.seconds_bound(call, topology, mesh) / share.value)
    assert seconds[1] / seconds[0] == pytest.approx(3.75)


@pytest.mark.parametrize("key", chips.CHIPS)
def test_every_chip_has_all_efficiencies(key):
    chip = chips.get(key)
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"):
        assert 0 < efficiencies.collective_efficiency(kind, 2**23, 64, chip).value <= 1
    assert 0 < efficiencies.memory_efficiency(chip).value < 1
    assert 0.6 < efficiencies.matmul_efficiency(chip, 1e13).value < 1


def test_small_matmuls_are_less_efficient_on_tpu7x():
    chip = chips.get("tpu7x")
    assert efficiencies.matmul_efficiency(chip, 2 * 1024**3).value == pytest.approx(0.303, abs=1e-3)
    shares = [efficiencies.matmul_efficiency(chip, 10**n).value for n in range(5, 15)]
    assert shares == sorted(shares)


@pytest.mark.parametrize(
    ("chip", "kind", "devices", "mib", "microseconds"),
    [("h100", "all-to-all", 8, 64, 221.3), ("b200", "all-gather", 4, 256, 367.3)],
)
def test_collectives_within_a_host_take_what_nccl_took(chip, kind, devices, mib, microseconds):
    topology = topologies.get(f"gpu:{chip}:1x8")
    mesh = Mesh((("rest", 8 // devices), ("group", devices)))
    call = Collective(kind, ("group",), devices, "bfloat16", mib * 2**20)
    (timed,) = roofline.time_operations([operation(call)], topology, mesh)
    assert timed.seconds == pytest.approx(microseconds * 1e-6)


def test_bus_bandwidths_are_those_that_nccls_authors_expect():
    """360 GB/s on H100, https://github.com/NVIDIA/nccl-tests/issues/326; here of 256 MiB."""
    points = [p for p in SETS["nccl_h100"] if (p.kind, p.devices) == ("all-gather", 8)]
    largest = max(points, key=lambda point: point.bytes)
    assert 7 / 8 * largest.bytes / largest.seconds == pytest.approx(360e9, rel=0.15)


@pytest.mark.parametrize("others", [2, 4])
def test_ragged_exchanges_within_a_host_take_longer_in_small_groups(others):
    """As steps did: 51.0, 27.3 and 15.6 s with groups of 2, 4 and 8, and 3.3 s without any."""
    seconds = {point.devices: point.seconds for point in RAGGED}
    steps = {2: 51.0, 4: 27.3, 8: 15.6}
    assert seconds[others] / seconds[8] == pytest.approx((steps[others] - 3.3) / 12.3, rel=0.05)


def test_all_to_alls_between_hosts_take_what_was_measured():
    topology = topologies.get("gpu:h100:8x8")
    call = Collective("all-to-all", ("all",), 64, "float32", 2**23)
    (timed,) = roofline.time_operations([operation(call)], topology, Mesh((("all", 64),)))
    assert timed.seconds == pytest.approx(337.8e-6)


def test_collectives_between_hosts_are_as_fast_as_measured():
    """4 GiB over 4 hosts of 8 B200 took 22.05 ms, as the source derives from bus bandwidth."""
    topology = topologies.get("gpu:b200:4x8")
    whole = Mesh((("all", 32),))
    reduction = Collective("all-reduce", ("all",), 32, "float32", 2**32)
    (timed,) = roofline.time_operations([operation(reduction)], topology, whole)
    assert timed.seconds == pytest.approx(22.05e-3, rel=0.02)
    # Eight rings of one GPU of each host, each with an eighth: the same bytes through each adapter.
    mesh = Mesh((("hosts", 4), ("gpus", 8)))
    part = Collective("all-reduce", ("hosts",), 4, "float32", 2**29)
    (ring,) = roofline.time_operations([operation(part)], topology, mesh)
    assert ring.seconds == pytest.approx(timed.seconds)
    # Within hosts, the efficiency is that of NVLink.
    inner = Collective("all-reduce", ("gpus",), 8, "float32", 2**29)
    assert interconnect.spanned_hosts(inner, topology, mesh) == 1
    assert interconnect.spanned_hosts(part, topology, mesh) == 4


@pytest.mark.parametrize(("mib", "milliseconds"), [(1, 0.088), (10, 0.157), (100, 0.647)])
def test_reductions_over_two_hosts_of_h100_take_what_was_measured(mib, milliseconds):
    """https://github.com/drmysore/nebius-h100-16gpu-benchmark."""
    reduction = Collective("all-reduce", ("all",), 16, "float32", mib * 2**20)
    topology = topologies.get("gpu:h100:2x8")
    (timed,) = roofline.time_operations([operation(reduction)], topology, Mesh((("all", 16),)))
    assert timed.seconds == pytest.approx(milliseconds * 1e-3)


@pytest.mark.parametrize(("name", "microseconds"), [("gpu:h100:16x8", 62), ("gpu:a100:32x8", 63)])
def test_the_latency_of_nccls_model_is_that_of_all_reduces_of_a_few_bytes(name, microseconds):
    """https://github.com/NVIDIA/nccl/issues/1469 and, for A100, .../652: within 10%."""
    topology = topologies.get(name)
    devices = topology.devices
    reduction = Collective("all-reduce", ("all",), devices, "float32", 16)
    latency = interconnect.seconds_latency(reduction, topology, Mesh((("all", devices),)))
    assert latency == pytest.approx(microseconds * 1e-6, rel=0.1)


@pytest.mark.parametrize(
    ("hosts", "points"), [(2, efficiencies.FEW_HOSTS), (48, efficiencies.HOSTS)]
)
def test_large_messages_between_hosts_are_more_efficient(hosts, points):
    shares = [point.efficiency for point in points]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(381.8 * 3 / 31 / 50)
    assert efficiencies.network_efficiency("all-reduce", 1.0, hosts).value == pytest.approx(
        shares[0]
    )


@pytest.mark.parametrize("kind", ["all-gather", "all-to-all"])
def test_more_hosts_are_not_more_efficient(kind):
    for size in (1e4, 1e6, 1e8, 1e10):
        shares = [
            efficiencies.network_efficiency(kind, size, hosts).value for hosts in (2, 4, 8, 16, 64)
        ]
        assert max(np.diff(shares)) < 1e-9


@pytest.mark.parametrize(("key", "share"), [("h100", 0.986), ("v5p", 1.0)])
def test_grouped_products_are_as_fast_as_products_where_nothing_is_published(key, share):
    chip = chips.get(key)
    found = efficiencies.grouped_efficiency(chip, 1e12)
    products = efficiencies.matmul_efficiency(chip, 1e12)
    assert found.value == pytest.approx(share * products.value)
    assert ("MegaBlocks" in found.source) == (share < 1)


def test_an_operation_of_groups_takes_the_time_of_its_products():
    topology = topologies.get("gpu:h100:1x1")
    times = []
    for is_grouped in (False, True):
        call = Operation(
            "x", "custom-call", "moe", "forward", matmul_flops=10**12, dtype="bfloat16",
            is_grouped=is_grouped,
        )  # fmt: skip
        (timed,) = roofline.time_operations([call], topology, Mesh.parse("data=1"))
        times.append(timed.seconds)
    assert times[0] / times[1] == pytest.approx(0.986)


@pytest.mark.parametrize("dtype", ["f8e4m3fn", "float8_e5m2"])
def test_products_in_fp8_have_their_own_rate_and_efficiency(dtype):
    chip = chips.get("h100")
    assert chip.peak(dtype) == 2 * chip.peak("bf16")
    assert efficiencies.matmul_efficiency(chip, 2e12, dtype).value == pytest.approx(0.648)
    assert efficiencies.matmul_efficiency(chip, 1e12, "bf16").value == pytest.approx(0.796)
    assert (
        efficiencies.matmul_efficiency(chip, 2e12, dtype).source == chip.sources["fp8_efficiency"]
    )


@pytest.mark.parametrize("dtype", ["f4e2m1fn", "float4_e2m1fn"])
def test_products_in_fp4_have_their_own_rate_and_the_efficiency_of_fp8(dtype):
    chip = chips.get("b200")
    assert chip.peak(dtype) == 2 * chip.peak("f8e4m3fn") == 9e15
    found = efficiencies.matmul_efficiency(chip, 2e12, dtype)
    assert found == efficiencies.matmul_efficiency(chip, 1e12, "f8e4m3fn")
    assert chips.get("h100").peak(dtype) == chips.get("h100").peak("bf16")


@pytest.mark.parametrize(("key", "teraflops"), [("a100", 175), ("h100", 646), ("b200", 1192)])
def test_small_products_are_slower_on_gpus(key, teraflops):
    """The medians of products of 1e10 FLOPs with at least 4,096 rows."""
    chip = chips.get(key)
    small, large = (efficiencies.matmul_efficiency(chip, flops).value for flops in (1e10, 1e12))
    assert small * chip.peak("bf16") / 1e12 == pytest.approx(teraflops, rel=0.01)
    assert small < 0.85 * large


def test_without_a_measurement_in_fp8_that_in_bfloat16_holds():
    chip = chips.get("tpu7x")
    found = (efficiencies.matmul_efficiency(chip, 1e12, dtype) for dtype in ("f8e4m3fn", "bf16"))
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    "chip, head_dim, filled",
    [("v6e", 128, 0.5), ("v6e", 256, 1), ("v6e", 192, 0.75), ("v5p", 128, 1), ("v5p", 64, 0.5)],
)
def test_heads_that_fill_a_part_of_the_matrix_unit_are_slower(chip, head_dim, filled):
    figures = chips.get(chip)
    products = efficiencies.matmul_efficiency(figures, 1e12)
    attention = FusedAttention(4096, False, False, head_dim)
    found = efficiencies.attention_efficiency(figures, attention, 1e12)
    assert found.value == pytest.approx(filled * products.value)
    assert "custom_model.md" in found.source


@pytest.mark.parametrize("mib, microseconds", [(512, 1806.7), (1024, 3108.8), (4096, 10094)])
def test_reductions_over_a_rack_take_what_was_measured(mib, microseconds):
    """https://github.com/coreweave/nccl-tests/pull/43; two racks take no less time than one."""
    seconds = []
    for racks in (1, 2):
        topology = topologies.get(f"gpu:gb200:{racks}x72")
        reduction = Collective("all-reduce", ("all",), 72 * racks, "float32", mib * 2**20)
        mesh = Mesh((("all", 72 * racks),))
        (timed,) = roofline.time_operations([operation(reduction)], topology, mesh)
        seconds.append(timed.seconds)
    assert seconds[0] == pytest.approx(microseconds * 1e-6, rel=0.01)
    assert seconds[0] <= seconds[1] < 1.5 * seconds[0]


@pytest.mark.parametrize("updates, faster", [(1, 1), (32, 17.8), (64, 17.8)])
def test_updates_make_ragged_exchanges_as_much_faster_as_was_measured(updates, faster):
    """https://github.com/marin-community/marin/issues/8077: 17.8 times with 32."""
    topology, mesh = topologies.get("gpu:b200:1x8"), Mesh((("all", 8),))
    seconds = []
    for count in (1, updates):
        call = Collective("ragged-all-to-all", ("all",), 8, "bfloat16", 2**26, updates=count)
        (timed,) = roofline.time_operations([operation(call)], topology, mesh)
        seconds.append(timed.seconds)
    whole = Collective("all-to-all", ("all",), 8, "bfloat16", 2**26)
    (timed,) = roofline.time_operations([operation(whole)], topology, mesh)
    assert seconds[1] == pytest.approx(max(seconds[0] / faster, timed.seconds), rel=1e-6)
