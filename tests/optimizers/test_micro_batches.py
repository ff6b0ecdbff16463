"""Compares micro-batched steps with full-batch steps, and checks that they need less memory."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import TopKRouter
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.program.step_programs import train_program
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tasks.evaluation import WeightedMeans
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.published_layers.routers import SigmoidRouter
from tests.layers.stacks.executions import loop
from tests.runtime import tiny_translation

KEY = (1, 1)
STACKS = ("encoder", "decoder")


def trainer(micro_batches: int, draws: bool = False, router=None, **stack) -> Trainer:
    """Returns a trainer that routes each row separately, so capacity does not depend on parts."""
    found = tiny_translation.trainer()
    task = found.task.p.copy()
    for name in STACKS:
        task.get(name).set(residual_dropout_rate=0.1 if draws else 0.0, **stack)
        moe = task.get(name).moe
        moe.router = router or moe.router.copy().set(second_expert="random" if draws else "all")
    params = found.p.copy().set(micro_batches=micro_batches)
    return params.instantiate(task.instantiate())


def batch(index: int = 0) -> dict:
    """Returns rows of different lengths, with equally many tokens in each half and quarter."""
    rows = tiny_translation.batch(index)
    rows["target_segments"] = rows["target_segments"].copy()
    rows["target_segments"][:4, 6:] = 0
    return {name: tf.constant(value) for name, value in rows.items()}


def gradients(found: Trainer, rows: dict, compiled: bool) -> NestedMap:
    theta = found.init_state().theta

    def compute():
        loss, metrics, flat = found.gradients(theta, rows, tf.constant(KEY))
        return NestedMap(loss=loss, metrics=NestedMap(metrics), gradients=flat)

    return tf.function(compute, jit_compile=True, autograph=False)() if compiled else compute()


@pytest.mark.parametrize(
    ("count", "compiled"), [(2, False), pytest.param(4, True, marks=pytest.mark.slow)]
)
def test_micro_batched_step_equals_the_full_batch_step(count, compiled):
    whole = gradients(trainer(1), batch(), compiled=False)
    parts = gradients(trainer(count), batch(), compiled)
    assert_close(parts.loss, whole.loss, "order")
    for (path, one), other in zip(
        parts.gradients.flatten_items(), whole.gradients.flatten(), strict=True
    ):
        assert_close(one, other, "order"), path
    assert set(parts.metrics) == set(whole.metrics)
    for name in ("loss", "cross_entropy", "accuracy", "tokens"):
        assert_close(parts.metrics[name][0], whole.metrics[name][0], "order")


def test_micro_batches_are_weighted_by_tokens():
    """One part, rows 0, 2, 4 and 6, has a quarter of the tokens."""
    rows = batch()
    segments = rows["target_segments"].numpy()
    segments[::2, 3:] = 0
    rows["target_segments"] = tf.constant(segments)
    whole, parts = (gradients(trainer(n), rows, False) for n in (1, 2))
    assert_close(parts.metrics.cross_entropy[0], whole.metrics.cross_entropy[0], "order")
    assert float(parts.metrics.tokens[0]) == float(whole.metrics.tokens[0])


def without_target_tokens(*places: slice) -> dict:
    """Returns rows of which some have no target tokens, or few."""
    rows = batch()
    segments = rows["target_segments"].numpy().copy()
    for place, left in zip(places, (0, 2), strict=False):
        segments[place, left:] = 0
    return rows | {"target_segments": tf.constant(segments)}


def test_a_part_without_target_tokens_weighs_nothing():
    """It is rows 0, 2, 4 and 6; as one token, it would pull the loss towards 0."""
    rows = without_target_tokens(slice(None, None, 2))
    whole, parts = (gradients(trainer(n), rows, False) for n in (1, 2))
    assert_close(parts.metrics.cross_entropy[0], whole.metrics.cross_entropy[0], "order")
    for name in ("loss", "cross_entropy", "accuracy"):
        assert float(parts.metrics[name][1]) == float(whole.metrics[name][1]) > 0


def test_a_batch_without_target_tokens_has_no_loss_and_no_gradient():
    rows = without_target_tokens(slice(None))
    for count in (1, 2):
        found = gradients(trainer(count), rows, False)
        assert float(found.metrics.cross_entropy[0]) == float(found.metrics.loss[1]) == 0.0
        assert all(np.isfinite(g.numpy()).all() for g in found.gradients.flatten())


def test_a_padding_batch_does_not_count_in_an_evaluation():
    found = trainer(1)
    theta = found.init_state().theta
    alone, together = WeightedMeans(), WeightedMeans()
    for means, batches in (
        (alone, [batch()]),
        (together, [batch(), without_target_tokens(slice(None))]),
    ):
        for rows in batches:
            metrics = found.eval_step(theta, rows)
            means.add({name: (float(v), float(w)) for name, (v, w) in metrics.items()})
    for name in ("loss", "cross_entropy", "accuracy"):
        assert together.means()[name] == pytest.approx(alone.means()[name], rel=1e-6)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_loads_of_unequal_parts_are_added(count):
    """What a router reports is a sum over tokens, whatever the number of target tokens."""
    router = SigmoidRouter.params().set(capacity_factor=8.0)
    recent = TopKRouter.params().set(
        k=2, capacity_factor=8.0, auxiliary_loss_weight=0.01, auxiliary_loss_level="global"
    )
    rows = without_target_tokens(slice(None, None, 4), slice(1, None, 4))
    for params, name in ((router, "selection_bias"), (recent, "recent_load")):
        found = []
        for parts in (1, count):
            one = trainer(parts, router=params)
            theta = one.train_step(one.init_state(), rows)[0].theta
            layers = (theta.encoder.layers[1], theta.decoder.layers[1])
            found.append([layer.feed_forward.router[name] for layer in layers])
        for one, other in zip(*(tf.nest.flatten(part) for part in found), strict=True):
            assert_close(other, one, "float32")
            assert np.any(one)


@pytest.mark.parametrize("cut", [0, 4], ids=["padding", "unequal"])
def test_metrics_of_routers_are_means_over_the_tokens_of_all_parts(cut):
    """Rows 0, 2, 4 and 6 are padding, which dropped nothing, or have a few tokens."""
    rows = batch()
    for side in ("source", "target"):
        segments = rows[f"{side}_segments"].numpy().copy()
        segments[::2, cut:] = 0
        rows[f"{side}_segments"] = tf.constant(segments)
    whole, parts = (gradients(trainer(n), rows, False) for n in (1, 2))
    names = ("dropped_share", "utilization", "router_entropy")
    found = [name for name in whole.metrics if name.endswith(names)]
    assert len(found) == len(names) * len(STACKS)
    for name in found:
        assert_close(parts.metrics[name][0], whole.metrics[name][0], "order")


def test_micro_batches_draw_different_random_numbers():
    """With equal rows and equal dropout, both parts would have equal results."""
    rows = {name: tf.repeat(value[:1], 8, axis=0) for name, value in batch().items()}
    seen: dict[str, list] = {}

    def look(path, output):
        seen.setdefault(path, []).append(output.numpy())

    found = trainer(2, draws=True)
    found.gradients(found.init_state().theta, rows, tf.constant(KEY), on_output=look)
    first, second = seen["encoder.layers[0]"]
    assert first.shape == (4, tiny_translation.LENGTH, 16) and not np.allclose(first, second)


def test_selection_bias_uses_the_load_of_all_micro_batches():
    router = SigmoidRouter.params().set(capacity_factor=8.0)
    biases = []
    for count in (1, 4):
        found = trainer(count, router=router)
        state, _ = found.train_step(found.init_state(), batch())
        biases.append(state.theta.encoder.layers[1].feed_forward.router.selection_bias)
    np.testing.assert_array_equal(*biases)
    assert np.any(biases[0])


@pytest.mark.slow
def test_micro_batches_on_eight_devices_equal_one_device():
    """Each device has two rows, one of each part."""
    rows = {name: np.concatenate([value.numpy()] * 2) for name, value in batch().items()}
    found = trainer(2, moe_every=1, execution=loop("products"))
    state, metrics = found.init_state(), []
    for _ in range(2):
        state, values = found.train_step(
            state, {name: tf.constant(value) for name, value in rows.items()}
        )
        metrics.append(float(values.loss))
    partitioning = Partitioning.make("data=8", "expert")
    runtime = SpmdRuntime(found, partitioning, devices_for(8))
    runtime.init_state()
    for loss in metrics:
        assert_close(runtime.train_step(rows).read()["loss"], loss, "order")


@pytest.mark.slow
def test_micro_batches_need_less_temporary_memory():
    found = []
    for count in (1, 4):
        specs = {name: tf.TensorSpec((64, *x.shape[1:]), x.dtype) for name, x in batch().items()}
        partitioning = Partitioning.make("data=1", "replicated")
        program, _ = train_program(trainer(count), partitioning, "gspmd", specs)
        compiled = program.lower(devices_for(1)).compile()
        found.append(compiled.memory_analysis().temp_size_in_bytes)
    assert found[1] < 0.5 * found[0]


def test_uneven_micro_batches_are_rejected():
    with pytest.raises(ValueError, match="step.micro_batches=3 .* input.batch_rows, the 8 rows"):
        gradients(trainer(3), batch(), compiled=False)
    with pytest.raises(ValueError, match="Trainer.micro_batches is 0; expected a whole number of"):
        trainer(0)
