# tests: wings/services/roll_back.py, training/run/options.py, wings/services/run_options.py
"""Tests roll backs: a run equals one whose input never had the batches that were skipped."""

import json

import numpy as np
import pytest

from lingvo_gshard.wings.services.divergence import LossWatch
from lingvo_gshard.wings.services.roll_back import (
    BatchesWithoutSkipped,
    RollBackLimitError,
    RollBacks,
    SkippedBatches,
)
from tests import tiny
from tests.services.spiked import InputWithout, SpikedInput, spikes
from tests.tools.train.train_processes import losses, train_in_two
from tests.training.test_loop import Run, without_speed


def made(path, steps=30, on_batch=None, input_=SpikedInput):
    run = Run(path, steps, on_batch, spikes=spikes())
    run.params.input = input_.params()
    return run


@pytest.mark.parametrize("ranges", [(), ((3, 5),), ((3, 5), (4, 9), (12, 12)), ((1, 2), (3, 4))])
def test_numbers_of_batches_equal_those_counted_one_by_one(ranges):
    skipped = SkippedBatches(ranges)
    kept = [n for n in range(1, 40) if not any(first <= n <= last for first, last in ranges)]
    assert [skipped.batch_of_step(step) for step in range(20)] == [0, *kept[:19]]
    batches = BatchesWithoutSkipped(tiny.TinyBatches(tiny.TinyInput.params(), 1), skipped)
    for number in kept[:8]:
        np.testing.assert_array_equal(next(batches)["x"], tiny.make_batch(1, number - 1)["x"])
    position = batches.get_state()
    after = next(batches)["x"]
    other = BatchesWithoutSkipped(tiny.TinyBatches(tiny.TinyInput.params(), 1), SkippedBatches())
    other.set_state(position)
    other.go_on_after(8, skipped)
    np.testing.assert_array_equal(next(other)["x"], after)


def metrics(**values):
    return {"loss": 9.0, "gradient_norm": 2.0, "roll_back": 1.0, "learning_rate": 0.1, **values}


def test_a_plan_goes_back_far_enough_and_at_most_to_the_oldest_checkpoint(tmp_path):
    found = RollBacks(spikes(most_roll_backs=2), tmp_path, 40)
    assert not found.is_due({"loss": 1.0}) and not found.is_due(metrics(roll_back=0.0))
    assert found.is_due(metrics(roll_back=0.25))
    assert found.plan(31, metrics(), []) is None
    assert found.plan(31, metrics(), [30, 31]) is None
    first = found.plan(31, metrics(), [20, 25, 28])
    assert first is not None
    assert (first.first_spike, first.last_step, first.checkpoint) == (30, 26, 25)
    assert (first.first_batch, first.last_batch) == (27, 31)
    assert first.metrics == {"loss": 9.0, "gradient_norm": 2.0}
    near = found.plan(31, metrics(), [28, 29])
    assert (near.last_step, near.checkpoint, near.first_batch, near.last_batch) == (28, 28, 29, 33)
    found.add(first)
    # Batches are counted without those skipped already: step 33 trained on batch 38.
    second = found.plan(33, metrics(), [25, 28])
    assert (second.last_step, second.first_batch, second.last_batch) == (28, 34, 38)
    found.add(second)
    again = RollBacks(spikes(most_roll_backs=2), tmp_path, 28)
    assert again.rows == [first, second]
    with pytest.raises(RollBackLimitError, match=r"step 40: spikes again after 2 roll backs \(los"):
        again.plan(40, metrics(), [36])
    assert RollBacks(spikes(), tmp_path, 0).rows == [] and not list(tmp_path.iterdir())


def test_a_damaged_file_of_roll_backs_is_named(tmp_path):
    (tmp_path / "roll_backs.jsonl").write_text('{"step": 3}\n')
    with pytest.raises(ValueError, match=r"roll_backs\.jsonl:1 is damaged: Object missing"):
        RollBacks(spikes(), tmp_path, 4)


@pytest.fixture(scope="module")
def never(tmp_path_factory):
    """A run whose input never has the batches that are skipped."""
    run = made(tmp_path_factory.mktemp("never"), input_=InputWithout)
    run.go()
    return run


def assert_equal_runs(one, other):
    assert without_speed(one.rows()) == without_speed(other.rows())
    mine, theirs = one.arrays(), other.arrays()
    for path in theirs:
        np.testing.assert_array_equal(mine[path], theirs[path])


@pytest.mark.slow
def test_a_roll_back_equals_never_having_seen_the_batches(never, tmp_path):
    run = made(tmp_path)
    run.go()
    assert_equal_runs(run, never)
    text = (tmp_path / "roll_backs.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [(row["first_spike"], row["step"]) for row in rows] == [(14, 15), (25, 26)]
    assert [(row["first_batch"], row["last_batch"]) for row in rows] == [(11, 15), (27, 31)]
    assert [(row["last_step"], row["checkpoint"]) for row in rows] == [(10, 8), (21, 20)]
    said = run.screen.getvalue()
    assert "steps 14 to 15 are spikes: loss" in said
    assert "Rolling back to step 10, from the checkpoint of step 8, and skipping batches 11" in said
    assert "roll backs: 2 (roll_backs.jsonl has each)" in said


class KilledError(BaseException):
    """Ends a run as a signal that nobody handles does."""


def raise_killed(*_):
    raise KilledError


@pytest.mark.slow
@pytest.mark.parametrize("where", ["deleted", "recorded", "restored", "later"])
def test_a_run_that_is_killed_during_a_roll_back_resumes_to_the_same(
    never, tmp_path, monkeypatch, where
):
    run = made(tmp_path, on_batch=lambda n: where == "later" and n == 18 and raise_killed())
    with monkeypatch.context() as patch:
        if where == "deleted":
            patch.setattr(RollBacks, "add", raise_killed)
        elif where == "recorded":
            plain = RollBacks.add
            patch.setattr(RollBacks, "add", lambda *args: raise_killed(plain(*args)))
        elif where == "restored":
            patch.setattr(LossWatch, "go_on", lambda _, read: read and raise_killed())
        with pytest.raises(KilledError):
            run.go()
    assert (tmp_path / "roll_backs.jsonl").exists() == (where != "deleted")
    resumed = made(tmp_path)
    resumed.go()
    assert_equal_runs(resumed, never)


@pytest.mark.slow
def test_the_limit_ends_the_run_with_a_sentence(tmp_path):
    run = made(tmp_path)
    run.params.step.spikes.most_roll_backs = 1
    with pytest.raises(RollBackLimitError) as caught:
        run.go()
    message = str(caught.value)
    assert message.startswith("step 26: spikes again after 1 roll back (loss ")
    assert "step.spikes.most_roll_backs is 1. The newest checkpoint before them is step 24" in (
        message
    )
    # A higher limit goes on.
    more = made(tmp_path)
    more.go()
    assert [row["step"] for row in more.rows()] == list(range(1, 31))


@pytest.mark.slow
def test_without_an_older_checkpoint_the_update_is_discarded(tmp_path):
    run = made(tmp_path, steps=20)
    run.params.run.checkpoint_every_steps = 0
    run.go()
    said = run.screen.getvalue()
    assert "step 15: no checkpoint is older than the spikes, so there is nothing to go back" in said
    assert "step 14 is a spike, and its update was discarded" in said
    assert not (tmp_path / "roll_backs.jsonl").exists()


@pytest.mark.slow
def test_roll_backs_over_a_mesh_of_two_processes_equal_never_having_seen_the_batches(tmp_path):
    name = "tests.services.spiked."
    mesh = ["--mesh=data=8", "--strategy=fsdp", "--steps=30"]
    one, other = tmp_path / "spiked", tmp_path / "without"
    main, worker = train_in_two([f"--experiment={name}spiked", f"--logdir={one}", *mesh])
    assert "Rolling back to step 10" in main and "Rolling back" not in worker
    # One process of eight devices would sum in another order.
    train_in_two([f"--experiment={name}without", f"--logdir={other}", *mesh])
    assert losses(one) == losses(other)
