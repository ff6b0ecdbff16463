# tests: wings/services/routers/counts.py
"""Tests that every runtime watches the routers of a step as the step itself routes."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.repetition import unstacked
from lingvo_gshard.core.token_kinds import TokenKinds
from lingvo_gshard.layers.moe import EinsumDispatch, TopKRouter
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.runtime.tpu_strategy import TpuStrategyRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training.step.metric_vectors import metric_vector
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.local_updates.runtime import LocalUpdatesRuntime
from lingvo_gshard.wings.optimizers.local_updates import LocalUpdates
from lingvo_gshard.wings.published_layers.routers import (
    ExpertChoiceRouter,
    HashRouter,
    SigmoidRouter,
    SinkhornRouter,
)
from lingvo_gshard.wings.services.routers.counts import (
    RoutingSums,
    records_of,
    watch_routers,
    watched_batch,
    watched_layers,
)
from tests.layers.stacks.executions import loop, pipeline
from tests.runtime import tiny_translation

STEP = 3
LANGUAGES, CLASSES = ("de", "es"), ("word", "digits", "other")


def _router(router, **values):
    return {"moe.router": router.params().set(**values)}


_LAYERS = {"num_layers": 4}
_EXPERT_CHOICE = {"moe.router": ExpertChoiceRouter.params().set(allow_causal=True)}
_DROPLESS = {"moe.dispatch": DroplessDispatch.params()}
CASES = {
    "loop": ({**_LAYERS, "execution": loop("full")}, {}),
    "loop of expert choice": ({**_LAYERS, "execution": loop(), **_EXPERT_CHOICE}, {}),
    "pipeline": ({**_LAYERS, "execution": pipeline(2)}, {}),
    "pipeline of expert choice": ({**_LAYERS, "execution": pipeline(2), **_EXPERT_CHOICE}, {}),
    "circular pipeline": ({"num_layers": 8, "execution": pipeline(2, circulations=2)}, {}),
    "micro-batches": ({}, {"micro_batches": 2}),
    "loop and micro-batches": ({**_LAYERS, "execution": loop()}, {"micro_batches": 4}),
    "einsum": ({"moe.dispatch": EinsumDispatch.params()}, {}),
    "dropless": (_DROPLESS, {}),
    "dropless loop": ({**_LAYERS, "execution": loop("full"), **_DROPLESS}, {}),
    "sigmoid": (_router(SigmoidRouter, auxiliary_loss_weight=0.1), {}),
    "top 3": (_router(TopKRouter, k=3, auxiliary_loss_level="global"), {}),
    "sinkhorn": (_router(SinkhornRouter, allow_causal=True), {}),
    "hash": (_router(HashRouter), {}),
}


@functools.cache
def _trainer(name):
    stack, values = CASES.get(name, ({}, {}))
    return tiny_translation.trainer(stack_values=stack, **values)


def _kinds(batch):
    rng = np.random.default_rng(7)
    shape, count = batch["source_ids"].shape, len(LANGUAGES) * len(CLASSES)
    names = ("source_kinds", "target_kinds")
    arrays = {name: rng.integers(0, count, shape).astype(np.int32) for name in names}
    return TokenKinds(arrays, LANGUAGES, CLASSES)


def _watched(runtime, trainer):
    """Returns the records of step STEP."""
    batch = tiny_translation.batch(STEP)
    kinds = _kinds(batch)
    read = watch_routers(runtime, trainer, batch, kinds, STEP)
    return records_of(STEP, read(), watched_layers(trainer.task), kinds)


@functools.cache
def _locally(name):
    """Returns the state before step STEP and the records of the step."""
    trainer = _trainer(name)
    runtime = SingleDeviceRuntime(trainer)
    runtime.init_state()
    state = runtime.state()
    state.step = np.int32(STEP - 1)
    runtime.load_state(state)
    return state, _watched(runtime, trainer)


def _metrics(name):
    """Returns the metrics of step STEP, computed eagerly by the training step's own functions."""
    trainer, batch = _trainer(name), tiny_translation.batch(STEP)
    theta = _locally(name)[0].theta.transform(tf.convert_to_tensor)
    key = tf.constant([trainer.p.seed, STEP])
    tensors = {n: tf.convert_to_tensor(x) for n, x in batch.items()}
    with context.scope(training=True, seed=key) as passing:
        trainer.task.loss(theta, tensors)
    named = ((n, value) for n, (value, _) in passing.metrics.items())
    names, values = metric_vector(named)
    return dict(zip(names, values.numpy().tolist(), strict=True))


def _layers_of(metrics):
    return sorted({n.removesuffix("/dead_experts") for n in metrics if n.endswith("dead_experts")})


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if "micro-batches" not in name])
def test_records_have_the_metrics_of_the_training_step(name):
    records, metrics = _locally(name)[1], _metrics(name)
    assert sorted(r.layer for r in records) == _layers_of(metrics)
    parts = 2 if "pipeline" in name else 1
    for r in records:
        choices = np.array(r.choices)
        for counts in (r.by_language, r.by_class):
            np.testing.assert_array_equal(np.sum(list(counts.values()), 0), choices)
        np.testing.assert_array_equal(np.sum(r.by_part, 0), choices)
        if r.positions:
            assert sum(r.positions) == choices.sum()
            assert sum(r.positions[r.capacity :]) == choices.sum() - sum(r.kept)
        assert np.all(np.array(r.kept) <= choices) and r.tokens == tiny_translation.ROWS * 10
        metric = functools.partial(lambda layer, what: metrics.get(f"{layer}/{what}"), r.layer)
        assert r.load_entropy <= np.log(8) + 1e-9
        if parts == 1:
            np.testing.assert_allclose(r.dropped_share, metric("dropped_share"), atol=1e-6)
            largest = max(r.kept) / np.mean(r.kept)
            np.testing.assert_allclose(largest, metric("load_max_over_mean"), rtol=1e-6)
            assert metric("dead_experts") == r.kept.count(0)
        for found, what in (
            (r.token_entropy, "router_entropy"),
            (r.balance_loss, "auxiliary_loss"),
        ):
            expected = metric(what)
            assert (found is None) == (expected is None)
            if found is not None:
                np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_an_eager_step_counts_every_token_once():
    trainer, batch = _trainer("plain"), tiny_translation.batch(STEP)
    kinds = _kinds(batch)
    sizes, fed = watched_batch(batch, kinds, STEP)
    theta = trainer.task.init(1)
    sums = RoutingSums(trainer, sizes)(theta, {n: tf.constant(x) for n, x in fed.items()})
    sums = {name: value.numpy() for name, value in sums.items()}
    found = records_of(STEP, sums, watched_layers(trainer.task), kinds)
    assert len(found) == 2
    for record, side in zip(found, ("source", "target"), strict=True):
        choices = np.array(record.choices)
        is_real = batch[f"{side}_segments"] > 0
        assert record.tokens == is_real.sum() and is_real.sum() < choices.sum() <= 2 * is_real.sum()
        # Every real token chooses one expert at least, whatever its kind.
        for names, number, counts in (
            (LANGUAGES, kinds.arrays[f"{side}_kinds"] // len(CLASSES), record.by_language),
            (CLASSES, kinds.arrays[f"{side}_kinds"] % len(CLASSES), record.by_class),
        ):
            np.testing.assert_array_equal(np.sum(list(counts.values()), 0), choices)
            for index, name in enumerate(names):
                tokens = np.sum(is_real & (number == index))
                assert tokens <= sum(counts[name]) <= 2 * tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "strategy"),
    [
        (name, "stage=2,data=4", "expert_pipeline")
        if "pipeline" in name
        else (name, "data=4,model=2", "expert_tensor")
        for name in CASES
    ],
)
def test_sharded_records_equal_those_of_one_device(name, mesh, strategy):
    state, expected = _locally(name)
    trainer, partitioning = _trainer(name), Partitioning.make(mesh, strategy)
    runtime = SpmdRuntime(trainer, partitioning, devices_for(partitioning.mesh.size))
    runtime.load_state(state)
    found = _watched(runtime, trainer)
    assert [c.function for c in runtime.compilations] == ["routers"]
    for mine, theirs in zip(found, expected, strict=True):
        counts = ("choices", "kept", "tokens", "positions", "by_part", "by_language", "by_class")
        for field in ("layer", "groups", "group_size", "capacity", *counts):
            assert getattr(mine, field) == getattr(theirs, field), field
        for field in ("dropped_share", "token_entropy", "balance_loss"):
            if getattr(theirs, field) is not None:
                np.testing.assert_allclose(
                    getattr(mine, field), getattr(theirs, field), rtol=1e-4, err_msg=field
                )


@pytest.mark.slow
def test_rows_over_the_bound_of_a_dropless_dispatch_are_dropped():
    dispatch = DroplessDispatch.params().set(bound=0.5, over_bound="drop")
    trainer = tiny_translation.trainer(stack_values={"moe.dispatch": dispatch})
    partitioning = Partitioning.make("data=8", "expert")
    runtime = SpmdRuntime(trainer, partitioning, devices_for(8))
    runtime.init_state()
    found = _watched(runtime, trainer)
    # The first step has the number 1 and its own random numbers.
    batch = tiny_translation.batch(STEP)
    (first, second) = records_of(
        1, watch_routers(runtime, trainer, batch, None, 1)(), watched_layers(trainer.task), None
    )
    metrics = runtime.train_step(batch).read()
    for record in (first, second):
        expected = metrics[f"{record.layer}/over_bound_share"]
        assert expected > 0 and abs(record.dropped_share - expected) < 1e-6
        assert record.by_class == record.by_language == {}
    assert all(record.dropped_share > 0 for record in found)


@pytest.mark.slow
def test_counts_are_integers_in_bfloat16():
    # Rounding may send a token to another expert, on every mesh, but no token is lost.
    trainer = tiny_translation.trainer(precision="bfloat16")
    runtime = SingleDeviceRuntime(trainer)
    runtime.init_state()
    for record in _watched(runtime, trainer):
        assert record.tokens == tiny_translation.ROWS * 10
        for counts in (record.by_language, record.by_class):
            np.testing.assert_array_equal(np.sum(list(counts.values()), 0), record.choices)


@pytest.mark.slow
def test_a_strategy_of_tensorflow_watches_as_one_device():
    state, expected = _locally("loop")
    strategy = tf.distribute.OneDeviceStrategy("/device:CPU:0")
    trainer = _trainer("loop")
    runtime = TpuStrategyRuntime(trainer, strategy, Partitioning.make("data=8", "expert"))
    runtime.load_state(state)
    assert _watched(runtime, trainer) == expected


@pytest.mark.slow
def test_local_updates_watch_the_weights_of_the_last_outer_step():
    state, expected = _locally("plain")
    rule = LocalUpdates.params().set(every=2)
    trainer = tiny_translation.trainer(local_updates=rule)
    partitioning = Partitioning.make("worker=2,data=2", "expert")
    runtime = LocalUpdatesRuntime(trainer, partitioning, devices_for(4))
    runtime.load_state(state)
    before = [(r.choices, r.by_class) for r in _watched(runtime, trainer)]
    assert before == [(r.choices, r.by_class) for r in expected]
    runtime.train_step(tiny_translation.batch(0)).read()
    assert [(r.choices, r.by_class) for r in _watched(runtime, trainer)] == before
    runtime.train_step(tiny_translation.batch(1)).read()
    assert [(r.choices, r.by_class) for r in _watched(runtime, trainer)] != before


@pytest.mark.slow
def test_watching_changes_neither_the_state_nor_the_step():
    state, _ = _locally("micro-batches")
    trainer = _trainer("micro-batches")
    watched, other = SingleDeviceRuntime(trainer), SingleDeviceRuntime(trainer)
    rows = []
    for runtime in (watched, other):
        runtime.load_state(state)
        if runtime is watched:
            found = _watched(runtime, trainer)
        rows.append(runtime.train_step(tiny_translation.batch(STEP)).read())
    assert rows[0] == rows[1]
    for r in found:
        # The metric is a mean over micro-batches, weighted equally.
        assert abs(r.balance_loss / rows[0][f"{r.layer}/auxiliary_loss"] - 1) < 1e-4


def test_layers_of_a_loop_have_the_names_of_separate_layers():
    layers = watched_layers(_trainer("loop").task)
    names = [f"{side}.layers[{i}].feed_forward" for side in ("encoder", "decoder") for i in (1, 3)]
    assert list(layers) == names
    assert unstacked("encoder.layers[1::2].feed_forward/kept", 2)[1].startswith(names[1])
