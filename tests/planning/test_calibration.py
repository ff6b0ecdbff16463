# tests: wings/planning/calibration.py, wings/planning/operation_rows.py
"""Tests that calibrations change the estimates of their kinds, and of their chip only."""

import pytest

from lingvo_gshard.wings.hlo.operations import Operation
from lingvo_gshard.wings.planning import calibration
from lingvo_gshard.wings.planning.calibration import Calibration, WorkKindRatio
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.operation_rows import ATTENTION, OTHER, PRODUCTS, ROUTING, kind_of
from lingvo_gshard.wings.planning.roofline import TimedOperation

LAYERS = {"encoder/attention": ATTENTION, "encoder/moe": ROUTING, "encoder/moe/experts": None}


def operation(layer, flops=0, phase="forward", **options):
    return Operation("op", "fusion", layer, phase, matmul_flops=flops, **options)


def made(**ratios):
    kinds = [
        WorkKindRatio(kind=kind, measured=ratio, predicted=1.0, ratio=ratio)
        for kind, ratio in ratios.items()
    ]
    return Calibration(
        chip="cpu",
        topology="cpu:1",
        experiment="an.experiment",
        mesh="data=1",
        steps="20:23",
        kinds=kinds,
        seconds_outside=0.002,
    )


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (operation("encoder/attention/dropout"), ATTENTION),
        (operation("encoder/attention", 8, "backward"), ATTENTION),
        (operation("encoder/moe", 8), ROUTING),
        (operation("encoder/moe/experts", 8), PRODUCTS),
        (operation("encoder/moe/experts"), OTHER),
        (operation("encoder/ffn", 8), PRODUCTS),
        (operation("encoder/ffn", 8, dispatch=True), ROUTING),
        (operation("encoder/attention", phase="optimizer"), "optimizer"),
    ],
)
def test_kinds(found, kind):
    assert kind_of(found, LAYERS) == kind


def test_estimates_change_and_bounds_do_not():
    timed = [
        TimedOperation(operation("encoder/ffn", 8), 1.0, 2.0, 0.0, 2.0, 3.0),
        TimedOperation(operation("encoder/norm"), 1.0, 2.0, 0.0, 2.0, 3.0),
    ]
    products, other = calibration.calibrated(timed, made(products=1.5), LAYERS)
    assert (products.seconds, products.seconds_bound) == (4.5, 2.0)
    assert other == timed[1]


def test_a_file_is_read_back(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(made(products=1.5).to_json())
    assert calibration.load(path) == made(products=1.5)
    assert "products x1.5, and 2 ms of a step" in made(products=1.5).note


def test_another_chip_is_refused():
    calibration.check_chip(made(), "c.json", topologies.get("cpu:8"))
    with pytest.raises(ValueError) as error:
        calibration.check_chip(made(), "c.json", topologies.get("v3:2x2"))
    assert str(error.value) == (
        "`calibration=c.json`: measured on cpu (core of AMD EPYC 9654), but `topology=v3:2x2` has "
        "v3 (TPU v3). Ratios hold for one chip only"
    )
