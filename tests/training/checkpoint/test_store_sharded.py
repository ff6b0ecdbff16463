# tests: training/run/checkpoint/arrays.py, training/run/checkpoint/store.py
"""Checks that sharded checkpoints restore the same bits on any mesh and on one device."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.run.checkpoint import arrays as checkpoint_arrays
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore

EXPERTS, MODEL, HIDDEN = 8, 6, 4
SPLITS = {
    "theta.experts.w": ("data", None, "model"),
    "theta.norm.scale": (),
    "theta.embedding": (None, "data"),
    "moments.experts.w.row": ("data",),
    "moments.embedding.first_moment": ("model", "data"),
}


def make_state(seed: int = 0) -> NestedMap:
    """Expert e's weights are e + small noise, so that an expert out of place shows."""
    generator = np.random.default_rng(seed)
    draw = lambda *shape: generator.normal(size=shape).astype(np.float32)  # noqa: E731
    experts = np.arange(EXPERTS, dtype=np.float32)[:, None, None] + 0.1 * draw(
        EXPERTS, MODEL, HIDDEN
    )
    return NestedMap(
        theta=NestedMap(
            experts=NestedMap(w=experts),
            norm=NestedMap(scale=draw(5).astype(jnp.bfloat16)),
            embedding=draw(6, 16),
        ),
        moments=NestedMap(
            experts=NestedMap(w=NestedMap(row=draw(EXPERTS, MODEL))),
            embedding=NestedMap(first_moment=(draw(6, 16) * 30).astype(np.int8)),
        ),
    )


def mesh_of(axes: dict[str, int]) -> jax.sharding.Mesh:
    count = int(np.prod(list(axes.values())))
    devices = np.array(jax.devices()[:count]).reshape(tuple(axes.values()))
    return jax.sharding.Mesh(devices, tuple(axes))


def like(axes: dict[str, int]) -> NestedMap:
    """Returns the abstract state, sharded over a mesh of these axes."""
    mesh, state = mesh_of(axes), make_state()

    def struct(path, array):
        split = [axis if axis in axes else None for axis in SPLITS[path]]
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*split))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return state.pack(struct(path, array) for path, array in state.flatten_items())


def place(state: NestedMap, like: NestedMap) -> NestedMap:
    def make(array, struct):
        return jax.make_array_from_callback(array.shape, struct.sharding, lambda i: array[i])

    return state.pack(make(a, s) for a, s in zip(state.flatten(), like.flatten(), strict=True))


def as_state(checkpoint) -> NestedMap:
    state = make_state()
    arrays = {
        f"{i}.{p}": a for i in ("theta", "moments") for p, a in getattr(checkpoint, i).items()
    }
    return state.pack(arrays[path] for path, _ in state.flatten_items())


def assert_equal_bits(state: NestedMap, expected: NestedMap) -> None:
    for (path, array), other in zip(state.flatten_items(), expected.flatten(), strict=True):
        array, other = np.asarray(array), np.asarray(other)
        assert (array.dtype, array.shape) == (other.dtype, other.shape), path
        assert array.tobytes() == other.tobytes(), path


@pytest.fixture
def said():
    return []


@pytest.fixture
def store(tmp_path, said):
    store = CheckpointStore(tmp_path / "checkpoints", keep=5, say=said.append)
    yield store
    store.close()


def digests_of(tmp_path: pathlib.Path, step: int) -> dict:
    record = tmp_path / "checkpoints" / str(step) / "run" / "run.json"
    return json.loads(record.read_text())["digests"]


def test_checkpoint_moves_between_meshes_and_one_device(store, said, tmp_path):
    """Saves on data=8, then restores and saves on data=2,model=2, one device, NumPy, and data=8."""
    state, step = make_state(), 1
    store.save(step, place(state, like({"data": 8})), None, "")
    for axes in ({"data": 2, "model": 2}, {"data": 1}, None, {"data": 4, "model": 2}, {"data": 8}):
        checkpoint = store.restore(like(axes) if axes else None)
        found = as_state(checkpoint)
        assert_equal_bits(found, state)
        assert checkpoint.step == step
        for array in found.flatten():
            assert isinstance(array, jax.Array if axes else np.ndarray)
        if axes:
            for array, struct in zip(found.flatten(), like(axes).flatten(), strict=True):
                assert array.sharding == struct.sharding
        step += 1
        store.save(step, found, None, "")
        assert store.finish()
        assert digests_of(tmp_path, step) == digests_of(tmp_path, step - 1)
    experts = np.asarray(as_state(store.restore()).theta.experts.w)
    np.testing.assert_array_equal(np.round(experts.mean(axis=(1, 2))), np.arange(EXPERTS))
    assert not said


def test_donation_by_later_steps_does_not_change_a_save(store):
    """Later steps donate the arrays while the save is in progress."""
    generator = np.random.default_rng(0)
    mesh = mesh_of({"data": 8})
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    values = generator.normal(size=(8, 2**18)).astype(np.float32)
    weights = jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
    take_step = jax.jit(lambda w: (w * 1.5 + 1.0, w.sum()), donate_argnums=0)
    weights, _ = take_step(weights)
    for step in (1, 2, 3):
        expected = np.array(weights)
        state = NestedMap(theta=NestedMap(w=weights), moments=NestedMap(m=weights))
        store.save(step, state, None, "")
        del state
        for _ in range(10):
            weights, _ = take_step(weights)
        jax.block_until_ready(weights)
        assert store.finish()
        checkpoint = store.restore()
        assert checkpoint.step == step
        assert np.array_equal(checkpoint.theta["w"], expected)
        assert np.array_equal(checkpoint.moments["m"], expected)


def test_later_steps_reuse_memory_after_a_save(store):
    """After a save, a step writes into the memory of the state again."""
    state = place(make_state(), like({"data": 8}))
    store.save(1, state, None, "")
    store.finish()
    take_step = jax.jit(lambda w: w + 1, donate_argnums=0)
    take_step(state.theta.experts.w)
    assert state.theta.experts.w.is_deleted()


def test_damaged_checkpoint_falls_back_to_the_previous_one(store, said, tmp_path):
    for step in (4, 8):
        store.save(step, place(make_state(step), like({"data": 8})), None, "")
    store.finish()
    record = tmp_path / "checkpoints" / "8" / "run" / "run.json"
    content = json.loads(record.read_text())
    content["digests"]["moments"]["embedding.first_moment"] ^= 1
    content["digest"] = ""
    record.write_text(json.dumps(content))
    checkpoint = store.restore(like({"data": 2, "model": 2}))
    assert_equal_bits(as_state(checkpoint), make_state(4))
    assert said[0] == (
        "Warning: the checkpoint of step 8 is damaged: moments has other contents than "
        "were saved: embedding.first_moment"
    )
    assert store.steps == [4] and (tmp_path / "damaged-8").is_dir()


def test_checkpoint_of_another_model_is_an_error_but_not_damage(store, said, tmp_path):
    store.save(4, place(make_state(), like({"data": 8})), None, "")
    other = like({"data": 8})
    whole = other.theta.norm.scale.sharding
    other.theta.norm.scale = jax.ShapeDtypeStruct((7,), jnp.bfloat16, sharding=whole)
    other.theta.embedding = jax.ShapeDtypeStruct((6, 16), jnp.bfloat16, sharding=whole)
    other.theta.bias = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=whole)
    store.finish()
    with pytest.raises(ValueError) as caught:
        store.restore(other)
    for part in (
        "The checkpoint's weights do not fit the model: bias is missing",
        "norm.scale is (5,), the model's is (7,)",
        "embedding is float32, the model's is bfloat16",
    ):
        assert part in str(caught.value)
    assert not said and store.steps == [4] and (tmp_path / "checkpoints" / "4").is_dir()


def test_only_weights_are_restored_sharded(store):
    store.save(4, make_state(), None, "")
    store.finish()
    checkpoint = store.restore(like({"data": 4, "model": 2}), parts=("theta",))
    assert not checkpoint.moments
    experts = checkpoint.theta["experts.w"]
    assert experts.addressable_shards[0].data.shape == (EXPERTS // 4, MODEL, HIDDEN // 2)


def test_unsharded_arrays_are_written_in_chunks(store, tmp_path, monkeypatch):
    """A process can read its shard without loading the whole array."""
    monkeypatch.setattr(checkpoint_arrays, "_CHUNK_BYTES", 64)
    store.save(4, make_state(), None, "")
    store.finish()
    found = checkpoint_arrays.describe(tmp_path / "checkpoints" / "4" / "theta")
    chunk = found["experts.w"].storage.chunk_shape
    assert np.prod(chunk) * 4 <= 64
    assert_equal_bits(as_state(store.restore(like({"data": 8}))), make_state())


def test_peek_reads_the_record_without_the_arrays(store, said, tmp_path):
    assert store.peek() is None
    for step in (4, 8):
        store.save(step, make_state(step), {"index": step}, f"name : {step}\n")
    store.finish()
    newest = store.peek()
    assert (newest.step, newest.position, newest.params_text) == (8, {"index": 8}, "name : 8\n")
    assert not newest.theta and not newest.moments
    (tmp_path / "checkpoints" / "8" / "run" / "run.json").write_text("{")
    assert store.peek().step == 4
    assert not said and store.steps == [4, 8]
    (tmp_path / "checkpoints" / "4" / "run" / "run.json").write_text("{")
    with pytest.raises(ValueError, match="none of its 2 checkpoints is readable"):
        store.peek()
