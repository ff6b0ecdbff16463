# tests: wings/verification/experiment.py, wings/verification/findings.py
# tests: wings/verification/causes.py
"""Tests that a right step is called equal, and that prepared defects are found and named."""

import pytest

import lingvo_gshard
from tests.verification import defects

PAGE = "defects.py"


def verify(suspect):
    params = defects.experiment(suspect)
    return lingvo_gshard.verify(params, mesh=defects.MESH, strategy=defects.STRATEGY)


def test_a_right_step_is_equal():
    found = verify(defects.Suspect)
    assert found.is_equal, found.lines()
    assert 0 < found.largest.difference.relative < 1e-12
    names = {
        kind: [c.name for c in found.compared if c.kind == kind] for kind in ("output", "gradient")
    }
    assert names["output"] == ["first", "suspect"]
    assert len(names["gradient"]) == 5 and "suspect.w_in" in names["gradient"]


# Layer -> the first tensor that differs, and a part of the sentence on its cause.
DEFECTS = {
    defects.MissingSum: (
        "output",
        "suspect",
        "copies of it, and their sum is the whole",
    ),
    defects.MaskPerDevice: ("output", "suspect", "along data is right: devices compute"),
    defects.SameKeyForOtherRows: ("output", "suspect", "without dropout all is equal"),
    defects.OtherKeyForSameRows: ("output", "suspect", "without dropout all is equal"),
    defects.LossSummed: ("output", "suspect/size", "4 times the whole one"),
    defects.GradientSummedTwice: ("gradient", "suspect.w_out", "summed twice, over data"),
    defects.GradientOfNeighbor: (
        "gradient",
        "suspect.w_out",
        "only the backward pass is wrong, the forward pass is equal: along dimension 0, in 2 "
        "shards along model, the shards are right and stand at other places: 1, 0",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("suspect", DEFECTS, ids=lambda suspect: suspect.__name__)
def test_a_defect_is_named(suspect):
    found = verify(suspect)
    kind, name, cause = DEFECTS[suspect]
    text = "\n".join(found.lines())
    assert not found.is_equal
    assert (found.first.kind, found.first.name) == (kind, name), text
    assert cause in found.first.likely, text
    assert found.first.annotation and PAGE in found.first.annotation.source, text


@pytest.mark.slow
def test_axes_of_one_size_are_told_apart():
    params = defects.experiment(defects.GradientSummedTwice)
    found = lingvo_gshard.verify(params, mesh="data=2,model=2", strategy=defects.STRATEGY)
    assert found.first.axes == (("data",),) and "over data (2 devices)" in found.first.likely
