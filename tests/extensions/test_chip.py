# tests: wings/planning/machines/chips.py
# tests: wings/planning/machines/topologies.py
"""Tests that one record adds a chip to the planner."""

import pytest

from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings.planning.machines import (
    chips,
    cuda,
    efficiencies,
    interconnect,
    topologies,
)
from lingvo_gshard.wings.planning.training import formulas

_SOURCE = "a datasheet"
TPU = {
    **chips.FIGURES["v5p"],
    "name": ("TPU of tomorrow", _SOURCE),
    "device_kinds": (("tomorrow",), _SOURCE),
    "peak_flops": ({"bf16": 1e15, "f32": 1e15}, _SOURCE),
    "network_bandwidth": (25e9, _SOURCE),
    "example": ("v9:4x4x4", _SOURCE),
    "product_efficiency": ({1024: 0.5, 4096: 0.9}, _SOURCE),
}
GPU = {
    **chips.FIGURES["h100"],
    "name": ("GPU of tomorrow", _SOURCE),
    "device_kinds": (("x100",), _SOURCE),
    "example": ("gpu:x100:1x8", _SOURCE),
}


@pytest.fixture(autouse=True)
def added(monkeypatch):
    monkeypatch.setattr(chips, "CHIPS", dict(chips.CHIPS))
    chips.add("v9", TPU)
    chips.add("x100", GPU)


def test_topologies_of_it_are_named_and_listed():
    topology = topologies.get("v9:4x4x8")
    assert topology.chip.name == "TPU of tomorrow" and topology.devices == 128
    assert {"v9:4x4x4", "gpu:x100:1x8"} <= set(topologies.names())
    assert "TPU of tomorrow" in topologies.listing()
    with pytest.raises(ValueError, match="expected 3 sizes, such as v9:4x4x4"):
        topologies.get("v9:4x4")


def test_its_figures_determine_estimates():
    chip = chips.get("v9")
    assert chips.of_device("tpu", "TPU tomorrow") is chip
    assert efficiencies.matmul_efficiency(chip, 2 * 4096**3).value == 0.9
    assert efficiencies.matmul_efficiency(chip, 2 * 2048**3).value == pytest.approx(0.7)
    network = interconnect.make_network(topologies.get("v9:2x2x2"), Mesh.parse("data=8"))
    assert network.rate == chip.link_bandwidth
    found = efficiencies.collective_efficiency("all-gather", 1e6, 4, chip)
    assert found == efficiencies.collective_efficiency("all-gather", 1e6, 4, chips.get("v5p"))
    assert formulas.default(topologies.get("gpu:x100:1x8")) is formulas.RATES["llama3"]


def test_a_gpu_is_compiled_for():
    if cuda.installed() is None:
        pytest.skip("XLA's compiler for GPUs is not installed")
    assert len(topologies.get("gpu:x100:1x8").compile_devices()) == 8


@pytest.mark.parametrize(
    ("key", "figures", "message"),
    [
        ("v5p", TPU, "There is a chip 'v5p': TPU v5p"),
        ("v8", {k: v for k, v in TPU.items() if k != "watts"}, "Chip 'v8': watts: is missing"),
        ("v8", TPU | {"wats": (1, _SOURCE)}, "Chip 'v8': wats: Did you mean 'watts'?"),
    ],
)
def test_a_wrong_record_is_refused(key, figures, message):
    with pytest.raises(ValueError) as error:
        chips.add(key, figures)
    assert message in str(error.value)
