"""Compares the hash router with the same hash in Python integers, and tests its properties."""

import zlib

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.repetition import Iteration, Repetition
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.published_layers.routers import HashRouter
from tests.layers.moe.routers import loops

WORD = 2**32


def make(path: str = "router", **values) -> HashRouter:
    return HashRouter.params().set(**{"num_experts": 5, **values}).instantiate(path=path)


def experts_of(router: HashRouter, ids, real=None) -> np.ndarray:
    """Returns the experts of each token [G,S,k]."""
    ids = tf.constant(ids, tf.int32)
    x = tf.zeros((*ids.shape, 4))
    routing = loops.route(router, NestedMap(), x, real, ids=ids)
    return np.stack([choice.expert_GS for choice in routing.assignments], -1)


def mixed(x: int) -> int:
    """Computes Wellons' 32-bit hash."""
    x = (x ^ (x >> 16)) * 0x7FEB352D % WORD
    x = (x ^ (x >> 15)) * 0x846CA68B % WORD
    return x ^ (x >> 16)


def experts_by_loop(token: int, k: int, experts: int, path: str, seed: int) -> list[int]:
    word = zlib.crc32(path.encode()) & 0x7FFFFFFF
    first = mixed((mixed((mixed(seed) + 0) % WORD) + word) % WORD)
    second = mixed((mixed((mixed(word) + seed) % WORD) + 0) % WORD)
    pairs = [token * experts + e for e in range(experts)]
    scores = [mixed((mixed((pair + first) % WORD) + second) % WORD) >> 8 for pair in pairs]
    return loops.top(np.array(scores), k)


class HashRouterTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters((1, 0), (2, 7), (5, 1))
    def test_experts_are_hashes_of_path_and_id(self, k, seed):
        ids = np.random.default_rng(1).integers(0, 32000, (2, 9))
        real = np.random.default_rng(2).random((2, 9)) < 0.7
        router = make("decoder.router", k=k, seed=seed, capacity_factor=0.5)
        routing = loops.route(
            router, NestedMap(), tf.zeros((2, 9, 4)), real, ids=tf.constant(ids, tf.int32)
        )
        for g in range(2):
            choices = [
                [(e, 1 / k) for e in experts_by_loop(token, k, 5, "decoder.router", seed)]
                for token in ids[g].tolist()
            ]
            slots = loops.slots(9, 5, k, 0.5)
            loops.assert_same(routing, g, loops.place(choices, real[g], 5, slots))
        self.assertEqual(routing.losses, {})

    def test_experts_depend_only_on_the_id(self):
        ids = np.array([[3, 8, 3, 1], [8, 8, 3, 2]])
        experts = experts_of(make(k=2), ids)
        by_id = {token: experts[ids == token][0] for token in np.unique(ids)}
        for place, token in np.ndenumerate(ids):
            self.assertAllEqual(experts[place], by_id[token])

    def test_ids_are_uniform_over_experts_and_pairs_of_experts(self):
        experts = experts_of(make(num_experts=4, k=2), np.arange(6000)[None])[0]
        pairs = np.bincount(experts[:, 0] * 4 + experts[:, 1], minlength=16).reshape(4, 4)
        self.assertFalse(np.diagonal(pairs).any())
        assert_close(pairs[~np.eye(4, dtype=bool)] / 500, np.ones(12), "sampling", least_scale=4)

    def test_hashes_differ_by_layer_and_seed(self):
        ids = np.arange(400)[None]
        found = [experts_of(router, ids) for router in (make(), make("other"), make(seed=1))]
        for one, other in ((0, 1), (0, 2), (1, 2)):
            equal = (found[one] == found[other]).mean()
            self.assertGreater(equal, 0.1)
            self.assertLess(equal, 0.3)

    def test_a_layer_in_a_loop_routes_like_a_separate_layer(self):
        ids, x = tf.range(50)[None], tf.zeros((1, 50, 4))
        inside = make("layers.body[1].router")
        for index in range(3):
            iteration = Iteration(Repetition("layers", body=2, times=3), index)
            with context.use(context.Context(iteration=iteration)):
                routing = inside.fprop(NestedMap(), x, tf.ones((1, 50)), ids)
            separate = experts_of(make(f"layers[{2 * index + 1}].router"), ids)
            self.assertAllEqual(routing.assignments[0].expert_GS[..., None], separate)

    def test_compiled_results_equal_eager_ones(self):
        ids = tf.constant(np.random.default_rng(1).integers(0, 2**31 - 1, (2, 50)), tf.int32)
        router = make(k=2)

        @tf.function(jit_compile=True)
        def compiled(ids):
            choices = router.fprop(
                NestedMap(), tf.zeros((2, 50, 4)), tf.ones((2, 50)), ids
            ).assignments
            return tf.stack([choice.expert_GS for choice in choices], -1)

        self.assertAllEqual(compiled(ids), experts_of(router, ids))

    def test_rejects_more_experts_per_token_than_experts(self):
        message = "router.k: 6 experts per token, but router.num_experts=5"
        with self.assertRaisesRegex(ValueError, message):
            make(k=6)

    def test_requires_ids(self):
        p = MixtureOfExperts.params().set(model_dim=4, hidden_dim=4, num_experts=5)
        p.router = HashRouter.params()
        with self.assertRaisesRegex(ValueError, "moe.router: HashRouter .* moe.has_token_ids"):
            p.instantiate(path="moe")
        with self.assertRaisesRegex(ValueError, "router: HashRouter routes by token ids, but none"):
            loops.route(make(), NestedMap(), tf.zeros((1, 3, 4)))


if __name__ == "__main__":
    testing.main()
