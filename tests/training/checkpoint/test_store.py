# tests: training/run/checkpoint/store.py, training/run/checkpoint/storage.py
# tests: training/run/checkpoint/run_item.py, training/run/checkpoint/orbax_storage.py
# tests: training/run/checkpoint/run_handler.py
"""Checks that checkpoints restore the same bits and survive damage and a full disk."""

import contextlib
import errno
import json
import logging
import os
import pathlib
import time
from collections.abc import Iterator
from unittest import mock

import msgspec
import numpy as np
import pytest

from lingvo_gshard.core import initializers
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.run.checkpoint import run_item, storage
from lingvo_gshard.training.run.checkpoint.arrays import unflatten
from lingvo_gshard.training.run.checkpoint.orbax_storage import steps_in
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore

# TensorStore's reads of a damaged checkpoint's other arrays may end after Orbax's event loop has.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def make_state(seed: int) -> NestedMap:
    generator = np.random.default_rng(seed)
    draw = lambda *shape: generator.normal(size=shape).astype(np.float32)  # noqa: E731
    theta = NestedMap(layers=[NestedMap(w=draw(40, 30)), NestedMap(w=draw(30, 5))], scale=draw(3))
    moments = NestedMap(
        layers=[NestedMap(w=NestedMap(row=draw(40))), NestedMap(w=NestedMap(row=draw(30)))],
        scale=NestedMap(row=draw(3)),
    )
    return NestedMap(theta=theta, moments=moments)


def write_extras(directory: pathlib.Path) -> None:
    (directory / "words.txt").write_text("a b c")


def save(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.save(step, make_state(step), {"index": step}, f"name : {step}\n", write_extras)
    store.finish()


def assert_holds(checkpoint, step: int) -> None:
    assert checkpoint.step == step
    assert checkpoint.position == {"index": step}
    state = make_state(step)
    for found, saved in ((checkpoint.theta, state.theta), (checkpoint.moments, state.moments)):
        expected = dict(saved.flatten_items())
        assert found.keys() == expected.keys()
        for path in expected:
            np.testing.assert_array_equal(found[path], expected[path])
            assert found[path].dtype == expected[path].dtype


@pytest.fixture
def said():
    return []


@pytest.fixture
def store(tmp_path, said):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2, say=said.append)
    yield store
    store.close()


def test_newest_checkpoint_is_restored_bit_for_bit(store, said):
    assert store.restore() is None
    save(store, 3, 12)
    checkpoint = store.restore()
    assert_holds(checkpoint, 12)
    assert checkpoint.params_text == "name : 12\n"
    assert (checkpoint.extras / "words.txt").read_text() == "a b c"
    assert {"lingvo_gshard", "tensorflow", "orbax-checkpoint"} <= checkpoint.record.versions.keys()
    assert not said


def test_store_keeps_the_latest_checkpoints(store):
    save(store, 1, 2, 3, 10)
    assert store.steps == [3, 10]


def test_weights_can_be_read_without_moments(store):
    save(store, 5)
    checkpoint = store.restore(parts=("theta",))
    assert checkpoint.moments == {}
    np.testing.assert_array_equal(checkpoint.theta["scale"], make_state(5).theta.scale)


def test_new_store_finds_existing_checkpoints(store, tmp_path, said):
    save(store, 5)
    reader = CheckpointStore(tmp_path / "checkpoints", say=said.append, writable=False)
    assert_holds(reader.restore(), 5)
    reader.close()
    nothing = CheckpointStore(tmp_path / "nowhere", writable=False)
    assert nothing.restore() is None and not (tmp_path / "nowhere").exists()


def files_of(directory: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that a complete checkpoint needs."""
    run = directory / "run"
    names = [run / "run.json", run / "params.txt", run / "extras" / "words.txt"]
    for item in ("theta", "moments"):
        names += [directory / item / "manifest.ocdbt", *(directory / item / "d").iterdir()]
    return names


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, pathlib.Path.unlink])
@pytest.mark.parametrize("which", range(6))
def test_damaged_checkpoint_falls_back_to_the_previous_one(store, said, tmp_path, damage, which):
    save(store, 4, 8)
    newest = tmp_path / "checkpoints" / "8"
    names = files_of(newest)
    damage(names[which % len(names)])
    if which < 3:
        assert store.peek().step == 4
    assert_holds(store.restore(), 4)
    assert said[0].startswith("Warning: the checkpoint of step 8 is damaged")
    assert store.steps == [4]
    assert (tmp_path / "damaged-8").is_dir()
    # Step 8 can be saved again.
    save(store, 8)
    assert_holds(store.restore(), 8)


def test_changed_value_is_detected(store, said, tmp_path):
    """All files are readable, but one number differs."""
    save(store, 4, 8)
    record = tmp_path / "checkpoints" / "8" / "run" / "run.json"
    content = json.loads(record.read_text())
    content["digests"]["theta"]["scale"] ^= 1
    content["digest"] = ""
    record.write_text(json.dumps(content))
    assert_holds(store.restore(), 4)
    assert "theta has other contents than were saved: scale" in said[0]


def test_changed_position_is_detected(store, said, tmp_path):
    """The record is readable, but the input would go on elsewhere."""
    save(store, 4, 8)
    record = tmp_path / "checkpoints" / "8" / "run" / "run.json"
    record.write_text(record.read_text().replace('"index": 8', '"index": 9'))
    assert store.peek().step == 4
    assert_holds(store.restore(), 4)
    assert "run/run.json is damaged" in said[0]


def test_reader_does_not_move_damaged_checkpoints(store, said, tmp_path):
    save(store, 4, 8)
    truncate(tmp_path / "checkpoints" / "8" / "run" / "run.json")
    reader = CheckpointStore(tmp_path / "checkpoints", say=said.append, writable=False)
    assert_holds(reader.restore(), 4)
    assert (tmp_path / "checkpoints" / "8").is_dir()
    reader.close()


def test_all_checkpoints_damaged_is_an_error(store, tmp_path):
    save(store, 4, 8)
    for step in (4, 8):
        truncate(tmp_path / "checkpoints" / str(step) / "run" / "run.json")
    with pytest.raises(ValueError, match="none of its 2 checkpoints is readable"):
        store.restore()


def test_full_disk_is_reported_and_training_continues(store, said, monkeypatch):
    save(store, 4)
    usage = storage.shutil.disk_usage("/")
    with monkeypatch.context() as patch:
        patch.setattr(storage.shutil, "disk_usage", lambda _: usage._replace(free=1000))
        store.save(8, make_state(8), {"index": 8}, "")
    assert said == [
        "Warning: the checkpoint of step 8 could not be saved (no space left: 1 MB needed, "
        "0 MB free); the last good one is step 4"
    ]
    save(store, 12)
    assert_holds(store.restore(), 12)


def test_disk_full_during_a_background_save_is_reported_and_training_continues(
    store, said, monkeypatch, caplog
):
    """The failure comes from the background thread, while the next steps run."""
    save(store, 4)

    def fail(directory):
        raise OSError(errno.ENOSPC, "No space left on device")

    with caplog.at_level(logging.WARNING):
        store.save(8, make_state(8), {"index": 8}, "", fail)
        assert not store.finish() or said
    assert len(said) == 1 and "step 8 could not be saved (No space left on device)" in said[0]
    assert "the last good one is step 4" in said[0]
    assert not caplog.records
    assert_holds(store.restore(), 4)
    save(store, 8)
    assert_holds(store.restore(), 8)


def test_error_that_orbax_raises_again_when_it_closes_ends_nothing(store, said, monkeypatch):
    """Its threads for metadata raise their own errors when they are waited for."""
    save(store, 4)
    plain = store._manager.close

    def close():
        plain()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store._manager, "close", close)
    monkeypatch.setattr(
        store._manager, "save", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left"))
    )
    store.save(8, make_state(8), {"index": 8}, "")
    assert len(said) == 1 and "step 8 could not be saved (No space left)" in said[0]
    save(store, 12)
    assert_holds(store.restore(), 12)


def test_background_failure_is_detected_without_waiting(store, said, monkeypatch):
    """Orbax reports it from `wait_until_finished`, which does not wait once the save has ended."""
    save(store, 4)
    manager, outcomes = store._manager, [ValueError("RESOURCE_EXHAUSTED: No space left on device")]
    plain = manager.wait_until_finished

    def wait_until_finished():
        plain()
        if outcomes:
            raise outcomes.pop()

    monkeypatch.setattr(manager, "wait_until_finished", wait_until_finished)
    store._saving = 8, None
    store.poll()
    assert len(said) == 1 and "step 8 could not be saved (no space left on device)" in said[0]


def spec(path, shape):
    return VariableSpec(path, "MH"[: len(shape)], shape, "float32", initializers.normal(1.0))


def test_unflatten_names_mismatched_arrays():
    like = NestedMap(a=spec("a", (2, 3)), b=spec("b", (4,)), c=spec("c", (1,)))
    zeros = lambda *shape: np.zeros(shape, np.float32)  # noqa: E731
    arrays = {"a": np.zeros((2, 3)), "b": zeros(5), "d": zeros(1)}
    with pytest.raises(ValueError) as caught:
        unflatten(like, arrays, "weights")
    for part in (
        "c is missing",
        "d is not in the model",
        "b is (5,), the model's is (4,)",
        "a is float64, the model's is float32",
    ):
        assert part in str(caught.value)
    arrays = {"a": zeros(2, 3), "b": zeros(4) + 1, "c": zeros(1)}
    np.testing.assert_array_equal(unflatten(like, arrays, "weights").b, np.ones((4,)))


@contextlib.contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Gives up root's right to write everywhere, where the tests have it."""
    if os.geteuid():
        yield
        return
    try:
        os.seteuid(65534)
    except OSError:
        pytest.skip("root is the only user here, as in the sandbox of bazel")
    try:
        yield
    finally:
        os.seteuid(0)


def test_directory_that_cannot_be_written_is_reported_at_once(store, said, tmp_path):
    """Orbax would wait 300 seconds for directories that another of its threads cannot create."""
    save(store, 1)
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    directory = tmp_path / "checkpoints"
    directory.chmod(0o555)
    started = time.monotonic()
    with as_ordinary_user():
        store.save(2, make_state(2), {"index": 2}, "")
        store.finish()
    directory.chmod(0o755)
    assert time.monotonic() - started < 60
    assert said == [
        "Warning: the checkpoint of step 2 could not be saved (Permission denied); "
        "the last good one is step 1"
    ]
    save(store, 3)
    assert store.steps == [1, 3]
    assert_holds(store.restore(), 3)


def test_checkpoint_of_a_later_version_is_refused_and_stays(store, said, tmp_path):
    """It may hold more than this version understands, so it is neither read nor set aside."""
    save(store, 4)
    path = tmp_path / "checkpoints" / "4" / "run" / "run.json"
    content = json.loads(path.read_text())
    assert content["format"] == 1
    content |= {"format": 2, "states_of_another_kind": [1]}
    content["versions"]["lingvo_gshard"] = "99.0"
    path.write_text(json.dumps(content))
    for read in (store.peek, store.restore):
        with pytest.raises(ValueError, match=r"4 has format 2, written by lingvo_gshard 99\.0;"):
            read()
    assert path.exists() and not said


def test_checkpoint_without_a_format_is_read(store, tmp_path):
    """As versions before 0.1.0 wrote it."""
    save(store, 4)
    path = tmp_path / "checkpoints" / "4" / "run" / "run.json"
    record = msgspec.json.decode(path.read_bytes(), type=run_item.RunRecord)
    old = msgspec.structs.replace(record, format=msgspec.UNSET).with_digest()
    path.write_bytes(msgspec.json.encode(old))
    assert b"format" not in path.read_bytes()
    assert_holds(store.restore(), 4)


@pytest.mark.parametrize("name", ["\u00b2", "\u0663", "007", "9" * 30, "-7", "7.0", "7 "])
def test_folders_whose_names_are_no_steps_are_no_checkpoints(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / "12").mkdir()
    assert steps_in(tmp_path) == [12]
