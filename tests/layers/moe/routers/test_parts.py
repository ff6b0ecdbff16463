# tests: layers/moe/routers/router.py, layers/moe/routers/scores.py
"""Tests of the parts that routers are composed of: declared by a class, bound to an object."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard import testing
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.layers.moe.routers import SwitchRouter, TopKRouter
from lingvo_gshard.layers.moe.routers.router import Capacity, Router
from lingvo_gshard.layers.moe.routers.scores import LinearScores


class DoubledScores(LinearScores):
    """Doubles the logits."""

    @layer_method
    def logits(self, theta, x_GSM):
        return 2.0 * super().logits(theta, x_GSM)


class DoubledSwitchRouter(SwitchRouter):
    """Declares another part in the place of `scores`."""

    scores = DoubledScores()


class UnlimitedRouter(Router):
    """Declares no capacity."""

    @classmethod
    def experts_per_token(cls, params):
        return 1


def make(router: type[Router], **values) -> Router:
    return router.params().set(num_experts=4, **values).instantiate(path="router")


class PartsTest(testing.TestCase):
    def test_each_router_has_parts_of_its_own(self):
        one = make(TopKRouter, model_dim=3, k=3)
        other = make(TopKRouter, model_dim=5, use_bias=True)
        self.assertEqual((one.selection.p.k, other.selection.p.k), (3, 2))
        self.assertEqual((one.scores.path, one.scores.router), ("router", one))
        self.assertEqual(sorted(one.variables), ["w_gate"])
        self.assertEqual(sorted(other.variables), ["b_gate", "w_gate"])

    def test_a_subclass_replaces_a_part(self):
        router = make(SwitchRouter, model_dim=3)
        doubled = make(DoubledSwitchRouter, model_dim=3)
        theta, x_GSM = router.init(1), tf.ones([1, 2, 3])
        expected = 2.0 * router.scores.logits(theta, x_GSM)
        self.assertAllClose(doubled.scores.logits(theta, x_GSM), expected, rtol=0.0, atol=0.0)
        self.assertEqual(doubled.p.jitter, SwitchRouter.params().jitter)

    def test_a_part_that_overrides_without_the_decorator_is_refused(self):
        with self.assertRaisesRegex(TypeError, "BareScores.logits overrides a @layer_method"):

            class BareScores(LinearScores):
                def logits(self, theta, x_GSM):
                    return super().logits(theta, x_GSM)

    def test_a_router_without_a_capacity_part_takes_no_dropless_dispatch(self):
        self.assertIs(type(make(UnlimitedRouter).capacity), Capacity)
        self.assertNotIn("capacity_factor", UnlimitedRouter.params())
        with self.assertRaisesRegex(ValueError, "UnlimitedRouter limits how many tokens"):
            make(UnlimitedRouter, is_dropless=True)


if __name__ == "__main__":
    testing.main()
