"""Tests remat policies, and saving and restoring the products of a remat unit."""

import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.autodiff import remat_policy
from lingvo_gshard.core.autodiff.remat_policy import SavedProducts
from lingvo_gshard.core.autodiff.remat_unit import restoring, saving

WITH_WEIGHT = [("BLM", "MH", "BLH"), ("BLM", "MND", "BLND"), ("EGCM", "EMH", "EGCH")]
BETWEEN_ACTIVATIONS = [("BLND", "BKND", "BNLK"), ("BNLK", "BKND", "BLND"), ("GSEC", "GSM", "EGCM")]


@pytest.mark.parametrize(
    ("policy", "saved"),
    [
        ("none", [*WITH_WEIGHT, *BETWEEN_ACTIVATIONS]),
        ("full", []),
        ("products", WITH_WEIGHT),
        ("products_but_hidden", [WITH_WEIGHT[1]]),
    ],
)
def test_a_policy_selects_products(policy, saved):
    is_saved = remat_policy.POLICIES[policy]
    products = [*WITH_WEIGHT, *BETWEEN_ACTIVATIONS]
    assert [product for product in products if is_saved(*product)] == saved


def test_an_unknown_policy_lists_the_valid_ones():
    for policy in remat_policy.POLICIES:
        remat_policy.check(policy, "task.encoder.rematerialize")
    with pytest.raises(ValueError, match=r"task\.x: unknown .* 'ful'\. Did you mean 'full'\?"):
        remat_policy.check("ful", "task.x")


def test_products_are_saved_and_restored_in_order():
    saved = SavedProducts("products")
    assert context.current().saved_products is None
    with saving(saved):
        assert context.current().saved_products is saved
        for value, product in enumerate([WITH_WEIGHT[0], BETWEEN_ACTIVATIONS[0], WITH_WEIGHT[1]]):
            assert saved.restore(*product) is None
            saved.save(*product, tf.constant(value))
    assert context.current().saved_products is None
    assert saved.layouts == ["BLH", "BLND"] and saved.results == [0, 2]
    with restoring(saved, [tf.constant(10), tf.constant(12)]):
        assert context.current().saved_products is saved
        assert saved.restore(*WITH_WEIGHT[0]) == 10
        assert saved.restore(*BETWEEN_ACTIVATIONS[0]) is None
        saved.save(*BETWEEN_ACTIVATIONS[0], tf.constant(11))
        assert saved.restore(*WITH_WEIGHT[1]) == 12
    assert context.current().saved_products is None and saved.results == [0, 2]
    assert saved.restore(*WITH_WEIGHT[0]) is None


def test_an_error_ends_saving():
    saved = SavedProducts("products")
    for within in (lambda: saving(saved), lambda: restoring(saved, [])):
        with pytest.raises(KeyError), within():
            raise KeyError
        assert context.current().saved_products is None
    assert saved.restore(*WITH_WEIGHT[0]) is None
