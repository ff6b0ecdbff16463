"""Compares the auxiliary loss per group, per batch and over several batches with NumPy."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe.routers import balance_loss
from lingvo_gshard.layers.moe.routers.top_k import TopKRouter
from lingvo_gshard.tasks.task import Task
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.schedules import Constant
from lingvo_gshard.training.step.trainer import Trainer
from tests.layers.moe.algorithm import softmax

G, S, E = 3, 7, 4
RNG = np.random.default_rng(1)
GATES = softmax(RNG.normal(size=(G, S, E)))
# The last group is all padding.
REAL = (RNG.random((G, S)) < 0.7) & (np.arange(G) < 2)[:, None]
COUNTED = np.eye(E)[GATES.argmax(-1)] * REAL[..., None]


def loss_of(gates_XE: np.ndarray, counted_XE: np.ndarray, real_X: np.ndarray, share=None) -> float:
    """Returns E * sum of (share of tokens) * (mean gate) of one group, computed by loops."""
    tokens = max(real_X.sum(), 1)
    total = 0.0
    for e in range(E):
        mean_gate = sum(g[e] for g, real in zip(gates_XE, real_X, strict=True) if real) / tokens
        chosen = sum(row[e] for row in counted_XE) / tokens
        total += (chosen if share is None else share[e]) * mean_gate
    return E * total


def flat(values: np.ndarray) -> np.ndarray:
    return values.reshape(G * S, *values.shape[2:])


def computed_loss(level: str, gates=GATES, *recent) -> tf.Tensor:
    gates, counted, mask = (tf.cast(v, tf.float32) for v in (gates, COUNTED, REAL))
    return balance_loss.auxiliary_loss(gates, counted, mask, level, *recent)


def recent_load(share=None, **values) -> tuple[balance_loss.RecentLoad, NestedMap]:
    params = balance_loss.RecentLoad.params().set(num_experts=E, **values)
    layer = params.instantiate(path="recent")
    theta = layer.init(1)
    return layer, theta if share is None else NestedMap(share=tf.constant(share, tf.float32))


class RoutingTask(Task):
    """A task that trains a router by its losses only."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        router = TopKRouter.params().set(model_dim=E, num_experts=E, auxiliary_loss_level="global")
        p.define("router", router, "The router.")
        return p

    def __init__(self, params, path=""):
        super().__init__(params, path)
        self.create_child("router", self.p.router)

    @layer_method
    def loss(self, theta, batch):
        routing = self.router.fprop(theta.router, batch["x"], batch["mask"])
        loss = routing.losses["auxiliary_loss"].value
        self.add_loss("auxiliary_loss", loss)
        self.add_metric("auxiliary_loss", loss)
        return tf.add_n(list(context.current().losses.values())), NestedMap()


class BalanceLossTest(testing.TestCase, parameterized.TestCase):
    def test_level_group_averages_the_losses_of_groups(self):
        """A group of padding alone has no loss, and does not count."""
        expected = np.mean(
            [loss_of(GATES[g], COUNTED[g], REAL[g]) for g in range(G) if REAL[g].any()]
        )
        assert_close(computed_loss("group"), expected, "float32")

    def test_level_batch_equals_the_loss_of_one_large_group(self):
        expected = loss_of(flat(GATES), flat(COUNTED), flat(REAL))
        assert_close(computed_loss("batch"), expected, "float32")
        self.assertGreater(abs(float(computed_loss("group")) - expected), 1e-2)

    def test_rows_of_padding_do_not_dilute_the_loss(self):
        even = np.full((4, 8, E), 1 / E)
        chosen = np.tile(np.eye(E), (2, 1))[None] * np.ones((4, 1, 1))
        real = (np.arange(4) < 1)[:, None] * np.ones((4, 8))
        arguments = (tf.cast(v, tf.float32) for v in (even, chosen * real[..., None], real))
        loss = balance_loss.auxiliary_loss(*arguments, "group")
        self.assertAllClose(loss, 1.0, rtol=1e-6, atol=0)

    def test_level_global_starts_from_the_first_batch(self):
        """The running mean starts at zero, which is not counted as a batch."""
        assert_close(
            computed_loss("global", GATES, *recent_load()), computed_loss("batch"), "float32"
        )

    def test_level_global_averages_shares_over_batches(self):
        before = np.array([0.7, 0.1, 0.1, 0.1])
        share = flat(COUNTED).sum(0) / REAL.sum()
        mean = 0.75 * before + 0.25 * share
        expected = loss_of(flat(GATES), flat(COUNTED), flat(REAL), mean)
        assert_close(
            computed_loss("global", GATES, *recent_load(before, decay=0.75)), expected, "float32"
        )
        # Without running shares the loss is that of the batch.
        without_running_shares = computed_loss("global", GATES, *recent_load(before, decay=0.0))
        assert_close(without_running_shares, computed_loss("batch"), "float32")

    @parameterized.parameters([[0.0, 0.0, 1.0, 0.0]], [[0.0] * E])
    def test_one_token_moves_the_average_and_none_keeps_it(self, load):
        before = np.array([0.7, 0.1, 0.1, 0.1])
        layer, theta = recent_load(before, decay=0.75)
        expected = 0.75 * before + 0.25 * np.array(load) if sum(load) else before
        assert_close(layer.fprop(theta, tf.constant(load)), expected, "float32")

    def test_balanced_loads_give_one(self):
        gates, counted = np.full((1, E, E), 1 / E), np.eye(E)[None]
        for level in balance_loss.LEVELS:
            recent = recent_load() if level == "global" else ()
            values = (tf.constant(v, tf.float32) for v in (gates, counted, np.ones((1, E))))
            assert_close(balance_loss.auxiliary_loss(*values, level, *recent), 1.0, "float32")

    @parameterized.parameters(*balance_loss.LEVELS)
    def test_the_gradient_flows_through_the_mean_gates(self, level):
        gates = tf.constant(GATES, tf.float32)
        before = np.array([0.7, 0.1, 0.1, 0.1])
        recent = recent_load(before) if level == "global" else ()
        with tf.GradientTape() as tape:
            tape.watch(gates)
            loss = computed_loss(level, gates, *recent)
        expected = np.zeros(GATES.shape)
        share = flat(COUNTED).sum(0) / REAL.sum()
        for g in range(G):
            if level == "group":
                tokens = max(REAL[g].sum(), 1)
                per_gate = E * COUNTED[g].sum(0) / tokens / tokens / REAL.any(1).sum()
            else:
                per_gate = (
                    (0.9 * before + 0.1 * share if level == "global" else share) * E / REAL.sum()
                )
            expected[g] = per_gate * REAL[g][:, None]
        assert_close(tape.gradient(loss, gates), expected, "float32")

    def test_training_updates_the_running_shares(self):
        params = Trainer.params().set(
            optimizer=Adam.params(), schedule=Constant.params().set(learning_rate=0.1)
        )
        trainer = params.instantiate(RoutingTask.params().instantiate(path=""))
        state = trainer.init_state()
        step = tf.function(trainer.train_step, autograph=False)
        kept, losses, expected = np.zeros(E), [], []
        for index in range(3):
            x = np.random.default_rng(index).normal(size=(2, 6, E)).astype(np.float32)
            w_gate = state.theta.router.w_gate.numpy()
            gates = softmax(x.reshape(-1, E) @ w_gate)
            share = np.zeros(E)
            for row in gates:
                share[np.argsort(-row)[:2]] += 1 / 2 / len(gates)
            kept = 0.9 * kept + 0.1 * share
            expected.append(E * (kept / kept.sum()) @ gates.mean(0))
            state, metrics = step(state, {"x": tf.constant(x), "mask": tf.ones([2, 6])})
            losses.append(float(metrics.auxiliary_loss))
            assert_close(state.theta.router.recent_load.share, kept, "float32")
        assert_close(losses, expected, "float32")
        self.assertFalse(state.moments.router.recent_load.share)


if __name__ == "__main__":
    testing.main()
