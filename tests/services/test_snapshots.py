# tests: wings/services/snapshots.py, wings/services/snapshot_parts.py
"""Checks that a snapshot in memory gives back the state to the bit, or nothing."""

import json
import os
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.run.checkpoint.run_item import Best
from lingvo_gshard.wings.services import snapshots
from lingvo_gshard.wings.services.run_lock import ROUND
from lingvo_gshard.wings.services.snapshot_parts import FOLDER, RESTORED, Part
from lingvo_gshard.wings.services.snapshots import SnapshotStore, restore


def mesh_of(*shape: int) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return jax.sharding.Mesh(devices, ("data", "model")[: len(shape)])


def state_on(mesh: jax.sharding.Mesh, seed: int = 0) -> NestedMap:
    """Makes a state with split, replicated, partly replicated and scalar arrays."""
    random = np.random.default_rng(seed)

    def put(values, *axes):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        return jax.device_put(values, sharding)

    w = random.normal(size=(8, 12)).astype(np.float32)
    return NestedMap(
        theta=NestedMap(w=put(w, "data", "model"), b=put(w[:, 0].astype(jnp.bfloat16), "data")),
        moments=NestedMap(w=put(random.integers(-9, 9, (8, 12)).astype(np.int8), None, "model")),
        loss_scale=NestedMap(scale=put(np.float32(seed + 0.5))),
        step=put(np.int32(seed)),
    )


def abstract(state: NestedMap) -> NestedMap:
    def struct(array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)

    return NestedMap(
        {part: tree.transform(struct) for part, tree in state.items() if part != "step"}
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(ROUND, "3")
    return tmp_path


def take(state: NestedMap, step: int, run: str = "run") -> None:
    store = SnapshotStore(run)
    store.save(step, state, {"batch": step}, "params", Best("dev/loss", 1.0, 2))
    store.finish()
    assert store.pop_problem() is None


def newest(folder) -> str:
    return str(folder / Part.within(folder)[-1].name)


def same(found, state) -> bool:
    return all(
        found[part][path].dtype == array.dtype and np.array_equal(found[part][path], array)
        for part in found
        for path, array in state[part].flatten_items()
    )


@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (1, 1)])
def test_a_snapshot_is_the_state_to_the_bit(folder, monkeypatch, shape):
    state = state_on(mesh_of(*shape), seed=7)
    take(state, 7)
    monkeypatch.setenv(RESTORED, newest(folder))
    found = restore("run", None, abstract(state))
    assert found.step == 7 and found.position == {"batch": 7} and found.params_text == "params"
    assert found.record.best == Best("dev/loss", 1.0, 2)
    assert found.arrays.keys() == {"theta", "moments", "loss_scale"} and same(found.arrays, state)
    assert found.arrays["theta"]["w"].sharding == state.theta.w.sharding


def split(folder, part: Part, count: int) -> list[str]:
    """Makes of one part the parts of several processes with an equal share of the devices each.

    Every piece goes to one of them, and those of replicated arrays to all.
    """
    content = (folder / part.name).read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header, paths = json.loads(content[8:begin]), []
    for index in range(count):
        mine, data = [], b""
        for number, piece in enumerate(header["pieces"]):
            if number % count != index and piece["size"] != piece["shape"]:
                continue
            size = int(np.prod(piece["size"])) * np.dtype(piece["dtype"]).itemsize
            mine.append({**piece, "place": len(data)})
            data += content[begin + piece["place"] :][:size]
        text = json.dumps({**header, "pieces": mine, "checksum": zlib.crc32(data)}).encode()
        path = folder / Part(part.round, part.serial, part.step, count, index).name
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        paths.append(str(path))
    return paths


@pytest.mark.parametrize("shape", [(8, 1), (4, 2), (2, 4), (2, 3), (1, 6), (1, 1)])
def test_parts_of_more_processes_make_the_state_on_another_mesh(folder, monkeypatch, shape):
    taken, other = state_on(mesh_of(4, 2), seed=7), state_on(mesh_of(*shape), seed=7)
    take(taken, 7)
    paths = split(folder, Part.within(folder)[-1], 3)
    monkeypatch.setenv(RESTORED, os.pathsep.join(paths))
    found = restore("run", None, abstract(other))
    assert found.step == 7 and found.position == {"batch": 7} and same(found.arrays, other)
    assert found.arrays["theta"]["w"].sharding == other.theta.w.sharding
    # Without one of the parts, some shards are missing.
    monkeypatch.setenv(RESTORED, os.pathsep.join(paths[:2]))
    assert restore("run", None, abstract(other)) is None


def test_arrays_of_numpy_come_back_as_such(folder, monkeypatch):
    state = NestedMap(theta=NestedMap(w=np.arange(6.0).reshape(2, 3)))
    take(state, 1)
    monkeypatch.setenv(RESTORED, newest(folder))
    found = restore("run", None, None)
    assert isinstance(found.arrays["theta"]["w"], np.ndarray) and same(found.arrays, state)


def test_the_state_may_change_right_after_the_call(folder, monkeypatch):
    """A step that donates its state writes over it."""
    state = state_on(mesh_of(4, 2), seed=1)
    expected = state_on(mesh_of(4, 2), seed=1)
    store = SnapshotStore("run")
    store.save(1, state, None, "", None)
    step = jax.jit(lambda theta: jax.tree.map(lambda x: x * 0, theta), donate_argnums=0)
    step({"w": state.theta.w, "b": state.theta.b})
    store.finish()
    monkeypatch.setenv(RESTORED, newest(folder))
    assert same(restore("run", None, abstract(expected)).arrays, expected)


def test_the_newest_two_are_kept_and_a_new_round_is_newer(folder, monkeypatch):
    state = state_on(mesh_of(2, 2))
    for step in (10, 20, 30):
        take(state, step)
    store = SnapshotStore("run")
    for step in (5, 10):
        store.save(step, state, None, "", None)
        store.finish()
    monkeypatch.setenv(ROUND, "4")
    take(state, 7)
    parts = Part.within(folder)
    assert len(parts) == 2 and (parts[-1].round, parts[-1].step) == (4, 7)


def test_without_an_agent_no_snapshot_is_taken(monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.delenv(RESTORED, raising=False)
    assert not SnapshotStore("run").is_open and restore("run", None, None) is None


@pytest.mark.parametrize("what", ["another run", "damage", "cut off", "another model", "missing"])
def test_what_does_not_fit_is_not_restored(folder, monkeypatch, what):
    state = state_on(mesh_of(4, 2))
    take(state, 7, "another" if what == "another run" else "run")
    path = folder / Part.within(folder)[-1].name
    content = bytearray(path.read_bytes())
    if what == "damage":
        content[-1] ^= 1
    path.write_bytes(content[:-9] if what == "cut off" else content)
    if what == "missing":
        path.unlink()
    monkeypatch.setenv(RESTORED, str(path))
    like = abstract(state)
    if what == "another model":
        like.theta.w = jax.ShapeDtypeStruct((9, 12), np.float32, sharding=like.theta.w.sharding)
    assert restore("run", None, like) is None


def test_a_full_memory_is_said_and_older_snapshots_stay(folder, monkeypatch):
    state = state_on(mesh_of(2, 2))
    take(state, 7)

    def replace(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(snapshots.os, "replace", replace)
    store = SnapshotStore("run")
    store.save(8, state, None, "", None)
    store.finish()
    assert "No space left on device" in (store.pop_problem() or "")
    assert [part.step for part in Part.within(folder)] == [7] and len(os.listdir(folder)) == 1


def test_names_of_parts_are_read_as_written():
    part = Part(3, 2, 1000, 4, 1)
    assert Part.parse(part.name) == part and part.first == Part(3, 2, 1000, 4, 0)
    for name in ("3-2-1000-4-1", "3-2-1000-4.part", "a-2-1000-4-1.part", "3-2-1000-4-1.part.99"):
        assert Part.parse(name) is None
