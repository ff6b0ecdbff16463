# tests: wings/object_stores/checkpoints.py, wings/object_stores/run_handler.py
# tests: wings/object_stores/problems.py, training/run/checkpoint/store.py
"""Tests that checkpoints in a bucket are complete with their marker, and survive trouble."""

import pytest

from lingvo_gshard.core.files import objects, stores
from lingvo_gshard.training.run.checkpoint.orbax_storage import marker, steps_in
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from lingvo_gshard.wings.object_stores import problems
from tests.training.checkpoint.test_store import assert_holds, make_state, save, write_extras

# As in tests/training/checkpoint/test_store.py.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def said():
    return []


@pytest.fixture
def directory(folder):
    return stores.path_of(folder) / "checkpoints"


@pytest.fixture
def store(directory, said):
    store = CheckpointStore(directory, keep=2, say=said.append)
    yield store
    store.close()


@pytest.mark.slow
def test_the_newest_checkpoints_are_kept_and_restored_bit_for_bit(store, directory, said):
    assert store.restore() is None
    save(store, 1, 2, 3)
    assert store.steps == [2, 3] and steps_in(directory) == [2, 3]
    assert objects.names(directory) == ["2", "3"]
    found = store.restore()
    assert_holds(found, 3)
    assert (found.extras / "words.txt").read_text() == "a b c"
    reader = CheckpointStore(directory, writable=False)
    assert_holds(reader.restore(before=3), 2)
    assert not said


@pytest.mark.slow
def test_a_checkpoint_without_its_marker_is_none(store, directory):
    save(store, 1, 2)
    objects.remove(marker(directory, 2))
    assert CheckpointStore(directory, writable=False).steps == [1]
    assert objects.names(directory) == ["1", "2"]
    # A run that may write deletes the remains.
    again = CheckpointStore(directory, keep=2)
    assert again.steps == [1] and objects.names(directory) == ["1"]
    save(again, 2)
    assert_holds(again.restore(), 2)
    again.close()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_set_aside(store, directory, folder, said):
    save(store, 1, 2)
    (data,) = (name for name in objects.find(directory / "2/theta/d"))
    objects.write_bytes(directory / "2/theta/d" / data, b"damaged")
    assert_holds(store.restore(), 1)
    assert "the checkpoint of step 2 is damaged" in said[0]
    assert said[1] == f"The damaged checkpoint was moved to {folder}/damaged-2"
    assert objects.names(folder) == ["checkpoints", "damaged-2"]
    save(store, 2)
    assert_holds(store.restore(), 2)


@pytest.mark.slow
def test_later_checkpoints_are_deleted(store, directory):
    save(store, 1, 2)
    store.delete_after(1)
    assert store.steps == [1] and objects.names(directory) == ["1"]
    save(store, 2)
    assert_holds(store.restore(), 2)


@pytest.mark.slow
def test_what_must_be_there_before_the_marker(directory, folder):
    complete: list[list[int]] = []
    store = CheckpointStore(directory, before_commit=lambda: complete.append(steps_in(directory)))
    save(store, 1, 2)
    store.close()
    assert complete == [[], [1]]


@pytest.mark.slow
def test_a_checkpoint_whose_rows_cannot_be_copied_is_none(directory, said):
    def fail() -> None:
        raise OSError("no rows")

    store = CheckpointStore(directory, say=said.append, before_commit=fail)
    save(store, 1)
    store.close()
    assert steps_in(directory) == [] and "step 1 could not be saved" in said[0]


@pytest.mark.slow
def test_busy_answers_cost_no_checkpoint(store, emulator, said):
    emulator.faults.failing = 6
    save(store, 1)
    assert not emulator.faults.failing
    assert_holds(store.restore(), 1)
    assert not said


@pytest.mark.slow
def test_a_bucket_that_vanishes_costs_the_checkpoints_meanwhile(store, emulator, said, monkeypatch):
    monkeypatch.setenv(problems.LIMIT, "2")
    save(store, 1)
    emulator.faults.is_gone = True
    save(store, 2, 3)
    assert len(said) == 2
    assert f"step 2 could not be saved (there is no bucket {emulator.bucket}" in said[0]
    assert "the last good one is step 1" in said[0]
    emulator.faults.clear()
    save(store, 4)
    assert store.steps == [1, 4]
    assert_holds(store.restore(), 4)


@pytest.mark.slow
def test_a_slow_bucket(store, emulator):
    emulator.faults.seconds = 0.2
    save(store, 1)
    assert_holds(store.restore(), 1)


@pytest.mark.slow
def test_training_goes_on_while_a_checkpoint_is_saved(store, emulator):
    save(store, 1)
    emulator.faults.requests.clear()
    emulator.faults.seconds = 0.3
    store.save(2, make_state(2), {"index": 2}, "name : 2\n", write_extras)
    before = len(emulator.faults.requests)
    emulator.faults.clear()
    assert store.finish() and store.steps == [1, 2]
    # Of some dozens of requests.
    assert before < 10
