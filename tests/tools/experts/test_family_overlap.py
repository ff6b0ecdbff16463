# tests: tools/experts/report.py
"""Compares the overlap of families with a loop over pairs of languages."""

import itertools

import numpy as np
import pytest

from lingvo_gshard.tools.experts.report import FamilyOverlap, family

LANGUAGES = ("de", "nl", "sv", "es", "pt_BR", "ja")


def test_overlap_is_the_mean_over_pairs_of_languages():
    rng = np.random.default_rng(3)
    shares = {name: rng.dirichlet(np.ones(5)) for name in LANGUAGES}
    found = FamilyOverlap.of(shares)
    within, between, germanic_romance = [], [], []
    for one, other in itertools.combinations(LANGUAGES, 2):
        common = sum(min(a, b) for a, b in zip(shares[one], shares[other], strict=True))
        (within if family(one) == family(other) else between).append(common)
        if {family(one), family(other)} == {"Germanic", "Romance"}:
            germanic_romance.append(common)
    assert len(within) == 4 and len(germanic_romance) == 6
    assert found.within == pytest.approx(np.mean(within))
    assert found.between == pytest.approx(np.mean(between))
    assert found.families["Germanic"]["Romance"] == pytest.approx(np.mean(germanic_romance))
    assert found.families["Romance"]["Germanic"] == found.families["Germanic"]["Romance"]
    # One language has no pair of its own family.
    assert "Japanese and Korean" not in found.families["Japanese and Korean"]


def test_languages_that_use_the_same_experts_overlap_fully():
    shares = np.array([0.5, 0.5, 0.0])
    found = FamilyOverlap.of({"de": shares, "nl": shares, "ja": np.array([0.0, 0.0, 1.0])})
    assert (found.within, found.between) == (1.0, 0.0)
    assert FamilyOverlap.of({"de": shares}) == FamilyOverlap(None, None, {})
