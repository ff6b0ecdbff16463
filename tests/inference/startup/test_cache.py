# tests: wings/inference/programs/startup_cache.py
"""Tests which entries the start-up cache keeps."""

import os

import numpy as np

from lingvo_gshard.core.lazy import jax
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.wings.inference.model_facts import ModelFacts
from lingvo_gshard.wings.inference.programs import startup_cache
from lingvo_gshard.wings.inference.programs.startup_cache import code_stamp

FACTS = ModelFacts(
    vocabulary_size=13, bos_id=1, end_ids=(2,), has_source=True, most_source=8, most_positions=16
)
ARRAYS = (
    Array("weights.a", (2, 3), "float32", ((), ())),
    Array("weights.b", (4,), "bfloat16", ((),)),
)


def written(directory, logdir, owner, content, used):
    """Returns an entry with two weights, last used at a time."""
    entry = startup_cache.find_entry(directory, owner, content)
    values = [jax.numpy.arange(6.0).reshape(2, 3), jax.numpy.arange(4, dtype="bfloat16")]
    entry.write_model(str(logdir), FACTS, ARRAYS, values)
    os.utime(entry.path, (used, used))
    return entry


def read(entry):
    """Returns what the entry holds, with NumPy arrays; None if it is unusable."""
    found = entry.read_model(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",)))
    return found and (found[0], list(map(np.asarray, found[1])))


def test_a_model_is_read_as_it_was_written_or_not_at_all(tmp_path):
    entry = written(str(tmp_path / "cache"), tmp_path, "owner", 1, 100)
    facts, (a, b) = read(entry)
    assert facts == FACTS and a.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert b.dtype.name == "bfloat16" and b.tolist() == [0, 1, 2, 3]
    for name in ("weights.safetensors", "model.json"):
        path = entry.path / name
        whole = path.read_bytes()
        for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[: len(whole) // 2], b""):
            path.write_bytes(damaged)
            assert read(entry) is None, (name, len(damaged))
        path.write_bytes(whole)
    assert read(entry) is not None


def test_what_nobody_needs_is_removed(tmp_path):
    directory, run, gone = str(tmp_path / "cache"), tmp_path / "run", tmp_path / "gone"
    run.mkdir()
    older = written(directory, run, "me", 1, 100)
    deleted = written(directory, gone, "you", 1, 200)
    unused = written(directory, run, "they", 1, 50)
    other = written(directory, run, "she", 1, 150)
    (tmp_path / "cache" / "my-files").mkdir()
    newest = written(directory, run, "me", 2, 10)
    size = startup_cache._size(newest.path)
    startup_cache.prune(newest, most_bytes=4 * size)
    assert not older.path.exists() and not deleted.path.exists()
    assert unused.path.exists() and other.path.exists() and newest.path.exists()
    startup_cache.prune(newest, most_bytes=2 * size)
    assert not unused.path.exists() and other.path.exists() and newest.path.exists()
    assert (tmp_path / "cache" / "my-files").exists()


def test_changed_code_has_another_stamp(tmp_path):
    path = tmp_path / "layer.py"
    path.write_text("a = 1\n")
    before = code_stamp([tmp_path])
    assert code_stamp([tmp_path]) == before
    path.write_text("a = 12\n")
    assert code_stamp([tmp_path]) != before
