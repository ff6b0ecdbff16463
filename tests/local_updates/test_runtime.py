# tests: wings/local_updates/runtime.py, wings/local_updates/workers.py
# tests: wings/optimizers/local_updates.py
"""Compares local updates with data parallelism at H = 1 and with NumPy; resumes exactly."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from lingvo_gshard.training.run.checkpoint.trainer_state import restored_state
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.local_updates.runtime import LocalUpdatesRuntime
from lingvo_gshard.wings.local_updates.workers import MeanMetrics, Workers, check
from lingvo_gshard.wings.optimizers.momentum import Momentum
from tests import tiny

MESH, COUNT, EVERY, ROWS = "worker=4,data=2", 4, 3, 16
OUTER = {"momentum": 0.9, "nesterov": True, "learning_rate": 0.7}


def make_trainer(every: int, sgd: bool = False, **outer) -> Trainer:
    p = tiny.experiment_params()
    p.task.hidden.dropout = 0.0
    p.step.clip_norm = 0.0
    if sgd:
        p.step.optimizer = Momentum.params().set(beta=0.0)
    p.step.local_updates.set(every=every, **outer)
    return p.step.instantiate(p.task, p.run.steps)


def make(trainer: Trainer, mesh: str = MESH, strategy: str = "fsdp") -> LocalUpdatesRuntime:
    partitioning = Partitioning.make(mesh, strategy)
    return LocalUpdatesRuntime(trainer, partitioning, devices_for(partitioning.mesh.size))


def assert_near(found: NestedMap, expected: NestedMap, tolerance: float = 1e-6) -> None:
    for (path, x), y in zip(found.flatten_items(), expected.flatten(), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=tolerance, err_msg=path)


def on_host(state: NestedMap) -> NestedMap:
    return state.transform(np.array)


@pytest.fixture(scope="module")
def runtime() -> LocalUpdatesRuntime:
    """A runtime of four workers with Adam and outer steps with Nesterov momentum."""
    return make(make_trainer(EVERY, **OUTER))


@pytest.mark.slow
def test_syncing_every_step_without_momentum_equals_data_parallelism():
    runtime = make(make_trainer(1, sgd=True), "worker=2,data=2")
    plain = SpmdRuntime(
        make_trainer(0, sgd=True), Partitioning.make("data=2", "data"), devices_for(2)
    )
    for each in (runtime, plain):
        each.init_state()
    for index in range(4):
        batch = tiny.make_batch(1, index)
        found, expected = runtime.train_step(batch).read(), plain.train_step(batch).read()
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert found["tokens"] == expected["tokens"] == ROWS
    assert_near(runtime.theta_on_host(), plain.theta_on_host())
    for worker in range(2):
        own = runtime.state().workers.theta.transform(lambda x, w=worker: np.asarray(x)[w])
        assert_near(own, plain.theta_on_host())


def by_hand(state: NestedMap, trainer: Trainer, steps: int) -> tuple[NestedMap, list]:
    """Returns the outer weights and each worker's state, computed by the formulas in NumPy."""

    @tf.function(autograph=False)
    def step(state, batch):
        return trainer.train_step(state, batch)[0]

    outer = on_host(state.theta)
    moments = outer.transform(np.zeros_like)
    states = [state] * COUNT
    for index in range(steps):
        batch = tiny.make_batch(1, index)
        shares = [{name: np.split(x, COUNT)[w] for name, x in batch.items()} for w in range(COUNT)]
        states = [step(own, share) for own, share in zip(states, shares, strict=True)]
        if (index + 1) % EVERY:
            continue
        means = [np.mean(x, 0) for x in zip(*(s.theta.flatten() for s in states), strict=True)]
        gradients = [w - mean for w, mean in zip(outer.flatten(), means, strict=True)]
        pairs = list(zip(moments.flatten(), gradients, strict=True))
        moments = outer.pack(0.9 * m + g for m, g in pairs)
        ahead = [g + 0.9 * m for (_, g), m in zip(pairs, moments.flatten(), strict=True)]
        outer = outer.pack(w - 0.7 * a for w, a in zip(outer.flatten(), ahead, strict=True))
        states = [NestedMap(s, theta=outer.transform(tf.constant)) for s in states]
    return outer, states


@pytest.mark.slow
def test_nesterov_momentum_equals_a_loop_in_numpy(runtime):
    runtime.init_state()
    begun = runtime.state()
    first = begun.workers.transform(lambda x: tf.constant(np.asarray(x)[0]))
    for index in range(2 * EVERY + 1):
        runtime.train_step(tiny.make_batch(1, index)).read()
    outer, states = by_hand(first, make_trainer(0), 2 * EVERY + 1)
    assert_near(runtime.theta_on_host(), outer, 1e-5)
    for worker, state in enumerate(states):
        own = runtime.state().workers.transform(lambda x, w=worker: np.asarray(x)[w])
        assert_near(own.theta, state.theta, 1e-5)
        assert_near(own.moments, state.moments, 1e-5)
        assert own.step == runtime.step == 2 * EVERY + 1
    loss = runtime.eval_step(tiny.make_batch(2, 0))["loss"]
    plain = make_trainer(0).eval_step(outer.transform(tf.constant), tiny.make_batch(2, 0))["loss"]
    np.testing.assert_allclose(loss, plain, rtol=1e-5)


def test_workers_exchange_only_weights_in_outer_steps(runtime):
    runtime.init_state()
    for index in range(EVERY):
        runtime.train_step(tiny.make_batch(1, index)).read()
    own = runtime.executable("train")
    used = {device for sharding in own.input_shardings for device in sharding.device_set}
    assert len(used) == own.program.mesh.size == 2
    assert own.collectives(), "its own devices do share the work"
    exchanged = runtime.executable("outer").collectives()
    assert set(hlo.count_by_kind(exchanged)) == {"all-reduce"}
    weights = runtime.state().theta.flatten()
    held = sum(x.addressable_shards[0].data.nbytes for x in weights)
    stopped = 1
    assert sum(row.bytes for row in exchanged) == held + stopped
    notes = runtime.pop_messages()
    (note,) = [note for note in notes if note.startswith("local updates")]
    assert f"4 workers synchronize every {EVERY} steps and exchange 0.00 MiB per device" in note


def test_resumes_exactly_between_two_outer_steps(runtime, tmp_path):
    trainer = make_trainer(EVERY, **OUTER)
    store = CheckpointStore(tmp_path / "checkpoints")
    runtime.init_state()
    for index in range(EVERY + 1):
        runtime.train_step(tiny.make_batch(1, index))
    averaged = on_host(runtime.state().theta)
    store.save(EVERY + 1, runtime.state(), None, "")

    def go_on() -> tuple[list, NestedMap]:
        batches = [tiny.make_batch(1, index) for index in range(EVERY + 1, 3 * EVERY + 1)]
        rows = [runtime.train_step(batch).read() for batch in batches]
        return rows, on_host(runtime.state())

    rows, state = go_on()
    assert store.finish()
    checkpoint = store.restore(runtime.abstract_state())
    assert_near(NestedMap(checkpoint.theta), NestedMap(dict(averaged.flatten_items())), 0)
    runtime.load_state(restored_state(trainer, checkpoint, runtime.abstract_state()))
    again, same = go_on()
    assert again == rows
    assert_near(same, state, 0)
    plain = restored_state(make_trainer(0), store.restore(None))
    assert set(plain) == {"step", "stopped", "theta", "moments"}
    assert_near(plain.theta, averaged, 0)
    assert all(not x.any() for x in plain.moments.flatten())
    store.close()


def test_workers_start_with_the_weights_of_a_regular_run(runtime):
    theta = make_trainer(0).init_state().theta.transform(lambda x: np.asarray(x) + 1)
    runtime.load_state(NestedMap(step=7, stopped=False, theta=theta, moments=NestedMap()))
    state = on_host(runtime.state())
    assert runtime.step == 7 and state.workers.step.tolist() == [7] * COUNT
    assert_near(state.theta, theta, 0)
    assert_near(state.workers.theta, theta.transform(lambda x: np.stack([x] * COUNT)), 0)
    assert all(not x.any() for x in [*state.outer.flatten(), *state.workers.moments.flatten()])


def test_weights_are_frozen_after_a_worker_stops(runtime):
    runtime.init_state()
    begun = on_host(runtime.state())
    bad = tiny.make_batch(1, 0)
    bad["x"][2 * ROWS // COUNT] = np.inf
    assert np.isnan(runtime.train_step(bad).read()["loss"])
    for index in range(1, EVERY):
        runtime.train_step(tiny.make_batch(1, index)).read()
    state = on_host(runtime.state())
    assert state.workers.stopped.tolist() == [False, False, True, False]
    assert_near(state.theta, begun.theta, 0)
    assert_near(state.outer, begun.outer, 0)
    stopped = state.workers.theta.transform(lambda x: x[2])
    assert_near(stopped, begun.workers.theta.transform(lambda x: x[2]), 0)
    assert_near(runtime.theta_on_host(), stopped, 0)
    moved = state.workers.theta.transform(lambda x: x[0])
    assert not np.allclose(moved.hidden.w, begun.theta.hidden.w)


def test_each_worker_has_its_own_seed(runtime):
    assert [trainer.p.seed for trainer in runtime._trainers.values()] == [1, 2, 3, 4]


@pytest.mark.slow
def test_workers_draw_different_random_numbers():
    p = tiny.experiment_params()
    p.task.hidden.dropout = 0.5
    p.step.local_updates.every = 5
    runtime = make(p.step.instantiate(p.task, p.run.steps), "worker=2", "replicated")
    runtime.init_state()
    half = tiny.make_batch(1, 0, ROWS // 2)
    runtime.train_step({name: np.concatenate([x, x]) for name, x in half.items()}).read()
    w = np.asarray(runtime.state().workers.theta.hidden.w)
    assert not np.allclose(w[0], w[1])


def test_run_that_does_not_end_with_an_outer_step_is_a_warning():
    said = {every: make(make_trainer(every)).pop_messages() for every in (3, 5)}
    assert said[3] == []
    (warning,) = said[5]
    assert "run.steps=12 is no multiple of step.local_updates.every=5" in warning
    assert "the evaluated weights will be those of step 10" in warning


def test_metrics_are_token_weighted_means():
    class Known:
        def __init__(self, **values):
            self.read = lambda: values

    rows = MeanMetrics([Known(loss=1.0, tokens=1.0), Known(loss=5.0, tokens=3.0)]).read()
    assert rows == {"loss": 4.0, "tokens": 4.0}
    assert MeanMetrics([Known(loss=1.0), Known(loss=5.0)]).read() == {"loss": 3.0}
    nothing = [Known(loss=1.0, tokens=0.0), Known(loss=3.0, tokens=0.0)]
    assert MeanMetrics(nothing).read() == {"loss": 2.0, "tokens": 0.0}


def partitioning(mesh: str, strategy: str = "data") -> Partitioning:
    return Partitioning.make(mesh, strategy)


def test_rows_and_weights_follow_the_mesh():
    """If `worker` is not the first axis, a worker's devices are not adjacent."""
    devices = devices_for(8)
    workers = Workers(partitioning("data=2,worker=4", "fsdp"), devices)
    assert str(workers.together) == "worker=4,data=2" and str(workers.partitioning.mesh) == "data=2"
    assert workers.devices[1] == [devices[1], devices[5]]
    assert workers.everywhere.split("BLM") == (("worker", "data"), (), ())
    assert workers.everywhere.split("MH", "weights") == workers.partitioning.split("MH", "weights")
    batch = {"x": np.arange(8)}
    assert [workers.rows_of(batch, w)["x"].tolist() for w in (0, 3)] == [[0, 1], [6, 7]]


@pytest.mark.parametrize(
    ("every", "over", "rows", "message"),
    [
        (5, None, 8, "every=5 needs an axis worker of `mesh`, as in `mesh=worker=4,data=2`; there"),
        (5, partitioning("data=8"), 8, "needs an axis worker of `mesh`.*; `mesh=data=8` has none"),
        (
            0,
            partitioning("worker=4,data=2"),
            8,
            "`mesh=worker=4,data=2` has an axis worker, which the strategy does",
        ),
        (
            5,
            partitioning("worker=4,data=2"),
            6,
            "input.batch_rows=6 is no multiple of the 4 workers of",
        ),
    ],
)
def test_incompatible_settings_are_rejected(every, over, rows, message):
    params = Trainer.params()
    params.local_updates.every = every
    with pytest.raises(ValueError, match=message):
        check(params, over, rows)


def test_compatible_settings_are_accepted():
    params = Trainer.params()
    check(params, None, 8)
    check(params, partitioning("worker=4", "B,G->worker"), 6)
    params.local_updates.every = 5
    check(params, partitioning("worker=4,data=2"), 8)
    check(params, partitioning("worker=4,data=2"), None)


def test_unsupported_operations_are_rejected(runtime):
    with pytest.raises(ValueError, match="may split nothing over axis worker"):
        make(make_trainer(5), strategy="B,G->data; H->worker")
    p = tiny.experiment_params()
    p.step.set(average_decay=0.9).local_updates.every = 5
    with pytest.raises(ValueError, match="step.average_decay=0.9 cannot be combined with"):
        make(p.step.instantiate(p.task, p.run.steps))
    with pytest.raises(ValueError, match="input.batch_rows=6 is no multiple of the 4 workers"):
        runtime.train_step(tiny.make_batch(1, 0, 6))
