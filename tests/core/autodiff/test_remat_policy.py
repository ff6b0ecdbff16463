"""Policies of rematerialization, and the products of a segment: kept once, given back in order."""

import pytest
import tensorflow as tf

from lingvo_gshard.core.autodiff import remat_policy
from lingvo_gshard.core.autodiff.remat_policy import Kept

WITH_WEIGHT = [("BLM", "MH", "BLH"), ("BLM", "MND", "BLND"), ("EGCM", "EMH", "EGCH")]
BETWEEN_ACTIVATIONS = [("BLND", "BKND", "BNLK"), ("BNLK", "BKND", "BLND"), ("GSEC", "GSM", "EGCM")]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("none", [*WITH_WEIGHT, *BETWEEN_ACTIVATIONS]),
        ("full", []),
        ("products", WITH_WEIGHT),
        ("products_but_hidden", [WITH_WEIGHT[1]]),
    ],
)
def test_what_a_policy_keeps(policy, kept):
    keeps = remat_policy.POLICIES[policy]
    products = [*WITH_WEIGHT, *BETWEEN_ACTIVATIONS]
    assert [product for product in products if keeps(*product)] == kept


def test_every_policy_is_a_choice_and_others_are_named():
    for policy in remat_policy.POLICIES:
        remat_policy.check(policy, "task.encoder.rematerialize")
    with pytest.raises(ValueError, match=r"task\.x: unknown .* 'ful'\. Did you mean 'full'\?"):
        remat_policy.check("ful", "task.x")


def test_products_are_recorded_and_replayed_in_order():
    kept = Kept("products")
    assert remat_policy.kept() is None
    with kept.recorded():
        assert remat_policy.kept() is kept
        for value, product in enumerate([WITH_WEIGHT[0], BETWEEN_ACTIVATIONS[0], WITH_WEIGHT[1]]):
            assert kept.take(*product) is None
            kept.add(*product, tf.constant(value))
    assert remat_policy.kept() is None
    assert kept.layouts == ["BLH", "BLND"] and kept.results == [0, 2]
    with kept.replayed([tf.constant(10), tf.constant(12)]):
        assert remat_policy.kept() is kept
        assert kept.take(*WITH_WEIGHT[0]) == 10
        assert kept.take(*BETWEEN_ACTIVATIONS[0]) is None
        kept.add(*BETWEEN_ACTIVATIONS[0], tf.constant(11))
        assert kept.take(*WITH_WEIGHT[1]) == 12
    assert remat_policy.kept() is None and kept.results == [0, 2]
    assert kept.take(*WITH_WEIGHT[0]) is None


def test_an_error_ends_recording():
    kept = Kept("products")
    for within in (kept.recorded, lambda: kept.replayed([])):
        with pytest.raises(KeyError), within():
            raise KeyError
        assert remat_policy.kept() is None
    assert kept.take(*WITH_WEIGHT[0]) is None
