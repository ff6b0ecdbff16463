# tests: core/autodiff/remat_policy.py, core/autodiff/remat_unit.py
"""Tests remat policies, and saving and restoring the products of a remat unit."""

import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.autodiff import remat_policy
from lingvo_gshard.core.autodiff.remat_policy import SavedProducts
from lingvo_gshard.core.autodiff.remat_unit import restoring, saving

WITH_WEIGHT = [("BLM", "MH", "BLH"), ("BLM", "MND", "BLND"), ("EGCM", "EMH", "EGCH")]
BETWEEN_ACTIVATIONS = [("BLND", "BKND", "BNLK"), ("BNLK", "BKND", "BLND"), ("GSEC", "GSM", "EGCM")]
# Rows that devices send each other.
EXCHANGED = ("GECM", "", "EGCM")


class RematPolicyTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("none", [*WITH_WEIGHT, *BETWEEN_ACTIVATIONS, EXCHANGED]),
        ("full", []),
        ("exchanges", [EXCHANGED]),
        ("products", [*WITH_WEIGHT, EXCHANGED]),
        ("products_but_hidden", [WITH_WEIGHT[1], EXCHANGED]),
    )
    def test_a_policy_selects_products(self, policy, saved):
        is_saved = remat_policy.POLICIES[policy]
        products = [*WITH_WEIGHT, *BETWEEN_ACTIVATIONS, EXCHANGED]
        self.assertEqual([product for product in products if is_saved(*product)], saved)

    def test_an_unknown_policy_lists_the_valid_ones(self):
        for policy in remat_policy.POLICIES:
            remat_policy.check(policy, "task.encoder.rematerialize")
        with self.assertRaisesRegex(
            ValueError, r"task\.x: unknown .* 'ful'\. Did you mean 'full'\?"
        ):
            remat_policy.check("ful", "task.x")


class SavedProductsTest(testing.TestCase):
    def test_products_are_saved_and_restored_in_order(self):
        saved = SavedProducts("products")
        self.assertIsNone(context.current().saved_products)
        with saving(saved):
            self.assertIs(context.current().saved_products, saved)
            for value, product in enumerate(
                [WITH_WEIGHT[0], BETWEEN_ACTIVATIONS[0], WITH_WEIGHT[1]]
            ):
                self.assertIsNone(saved.restore(*product))
                saved.save(*product, tf.constant(value))
        self.assertIsNone(context.current().saved_products)
        self.assertEqual(saved.layouts, ["BLH", "BLND"])
        self.assertEqual(saved.results, [0, 2])
        with restoring(saved, [tf.constant(10), tf.constant(12)]):
            self.assertIs(context.current().saved_products, saved)
            self.assertEqual(saved.restore(*WITH_WEIGHT[0]), 10)
            self.assertIsNone(saved.restore(*BETWEEN_ACTIVATIONS[0]))
            saved.save(*BETWEEN_ACTIVATIONS[0], tf.constant(11))
            self.assertEqual(saved.restore(*WITH_WEIGHT[1]), 12)
        self.assertIsNone(context.current().saved_products)
        self.assertEqual(saved.results, [0, 2])
        self.assertIsNone(saved.restore(*WITH_WEIGHT[0]))

    def test_an_error_ends_saving(self):
        saved = SavedProducts("products")
        for within in (lambda: saving(saved), lambda: restoring(saved, [])):
            with self.assertRaises(KeyError), within():
                raise KeyError
            self.assertIsNone(context.current().saved_products)
        self.assertIsNone(saved.restore(*WITH_WEIGHT[0]))


if __name__ == "__main__":
    testing.main()
