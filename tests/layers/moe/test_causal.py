# tests: layers/moe/layer.py, layers/moe/routers/router.py
"""Tests that in a causal layer no output depends on later tokens, however full the experts are."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.layers.moe import (
    EinsumDispatch,
    GatherDispatch,
    MixtureOfExperts,
    SwitchRouter,
    Top2Router,
    TopKRouter,
)
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.published_layers.routers import (
    ExpertChoiceRouter,
    SigmoidRouter,
    SinkhornRouter,
)

S, M, CASES = 16, 4, 40
ROUTERS = {
    "top2": Top2Router.params(),
    "top2_lingvo": Top2Router.params().set(mode="lingvo"),
    "top_k": TopKRouter.params().set(k=3),
    "sigmoid": SigmoidRouter.params().set(k=2),
    "switch": SwitchRouter.params(),
}


def make(router, **values) -> MixtureOfExperts:
    p = MixtureOfExperts.params().set(model_dim=M, hidden_dim=4, num_experts=4, is_causal=True)
    return p.set(**{"group_size": S, "router": router.copy(), **values}).instantiate(path="moe")


def changed_outputs(layer, rows: int = 1, first: int = 8) -> int:
    """Returns how many outputs before `first` change with the tokens from `first` on.

    The last of `rows` rows is changed, in each of CASES cases. Groups may span rows.
    """
    mask = tf.ones([rows, S], tf.int32)

    @tf.function(autograph=False)
    def outputs(theta, x_BLM, seed):
        with context.scope(training=True, seed=tf.stack([seed, 1])):
            return layer.fprop(theta, x_BLM, mask)[:, :first]

    changed = 0
    for case in range(CASES):
        rng, seed = np.random.default_rng(case), tf.constant(case)
        theta = layer.init(case)
        x_BLM = rng.normal(size=(rows, S, M)).astype(np.float32)
        other_BLM = x_BLM.copy()
        other_BLM[-1, first:] = rng.normal(size=(S - first, M))
        one, other = (outputs(theta, tf.constant(x), seed).numpy() for x in (x_BLM, other_BLM))
        changed += int(np.sum(np.any(one != other, -1)))
    return changed


class CausalTest(testing.TestCase, parameterized.TestCase):
    @parameterized.product(dispatch=[GatherDispatch, EinsumDispatch], name=tuple(ROUTERS))
    def test_no_output_depends_on_later_tokens(self, name, dispatch):
        layer = make(ROUTERS[name].copy().set(capacity_factor=1.0), dispatch=dispatch.params())
        self.assertEqual(changed_outputs(layer), 0)

    @parameterized.parameters(4, 8, 32)
    def test_groups_may_be_parts_of_rows_or_span_them(self, group_size):
        router = ROUTERS["top2"].copy().set(capacity_factor=1.0)
        layer = make(router, group_size=group_size)
        self.assertEqual(changed_outputs(layer, rows=2), 0)

    @parameterized.parameters("top2", "top_k", "sigmoid")
    def test_the_papers_order_depends_on_later_tokens_and_is_refused(self, name):
        router = ROUTERS[name].copy().set(capacity_factor=1.0, order="choice")
        with self.assertRaisesRegex(
            ValueError, r"moe\.router\.order='choice' .*set moe\.router\.order="
        ):
            make(router)
        layer = make(router.set(allow_causal=True))
        self.assertGreater(changed_outputs(layer), 0)
        make(
            router.set(allow_causal=False, capacity_factor=0.0), dispatch=DroplessDispatch.params()
        )
        self.assertEqual(make(router, is_causal=False).router.capacity.order, "choice")

    @parameterized.parameters(ExpertChoiceRouter, SinkhornRouter)
    def test_routers_that_always_see_later_tokens_are_refused(self, router):
        with self.assertRaisesRegex(ValueError, "routes a token by the tokens after it"):
            make(router.params())

    def test_the_order_of_layers_that_are_not_causal_is_the_papers(self):
        self.assertEqual(make(ROUTERS["top2"], is_causal=False).router.capacity.order, "choice")
        self.assertEqual(make(ROUTERS["top2"]).router.capacity.order, "token")
        with self.assertRaisesRegex(ValueError, "order is 'tokens'; expected '', 'choice' or 'to"):
            ROUTERS["top2"].copy().set(order="tokens")


if __name__ == "__main__":
    testing.main()
