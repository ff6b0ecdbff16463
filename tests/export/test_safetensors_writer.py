# tests: wings/export/safetensors_writer.py, api/export.py, wings/export/formats.py
"""Tests exported weights: read without this package, they are those of the checkpoint."""

import json
import pathlib

import numpy as np
import pytest
import rich.console
import safetensors
import safetensors.numpy

import lingvo_gshard as gshard
from lingvo_gshard.core.config.params_text import to_json
from lingvo_gshard.data.vocabularies.vocabulary import Vocabulary
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from lingvo_gshard.wings.export import safetensors_writer
from tests.export import elsewhere
from tests.tools.train import tiny_train  # noqa: F401

QUIET = rich.console.Console(quiet=True)

# The part of a program that shows what the page's program has read.
_DIGESTS = """
import hashlib
for name in sorted(weights):
    print(name, hashlib.sha256(weights[name].tobytes()).hexdigest()[:16])
"""


def stored(logdir):
    """Returns the arrays of the newest checkpoint, part -> path -> array."""
    store = CheckpointStore(pathlib.Path(logdir) / "checkpoints", writable=False)
    return store.restore().arrays


def test_weights_are_read_without_this_package(trained_logdir, tmp_path):
    run = gshard.load(trained_logdir)
    export = run.export(tmp_path / "weights", "safetensors")
    assert (export.step, export.experiment) == (20, "translation.from_files")
    assert set(export.files) == {"model.safetensors", "params.json", "vocabulary/joint.model"}
    assert export.bytes == sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())

    program = elsewhere.program_of_page("read_weights.py")
    printed = elsewhere.run(program + _DIGESTS, tmp_path / "weights").splitlines()
    theta = stored(trained_logdir)["theta"]
    count = len(theta)
    assert printed[0] == "translation.from_files step 20 width 16"
    for line in printed[1 : count + 1]:
        name, layout, *shape_and_dtype = line.split(maxsplit=2)
        assert shape_and_dtype == [f"{theta[name].shape} float32"]
        assert len(layout) == theta[name].ndim
    ids = Vocabulary.load(str(tmp_path / "weights" / "vocabulary"), "joint").encode(
        "The file could not be saved."
    )
    assert printed[count + 1].endswith(str(ids))
    expected = elsewhere.run(
        "import numpy as np\nweights = dict(np.load(sys.argv[1]))\n" + _DIGESTS,
        _as_npz(theta, tmp_path / "theta.npz"),
    )
    assert printed[count + 2 :] == expected.splitlines()
    layouts = _metadata(tmp_path / "weights" / "model.safetensors")["layouts"]
    assert json.loads(layouts)["encoder.layers[0].feed_forward.experts.w_in"] == "EMH"


def _as_npz(arrays, path):
    np.savez(path, **arrays)
    return path


def _metadata(path):
    with safetensors.safe_open(path, framework="numpy") as file:
        return file.metadata()


def test_averages_are_exported_if_the_run_keeps_them(tmp_path):
    settings = ["step.average_decay = 0.5"]
    params = gshard.experiment("test.tiny", settings=settings)
    gshard.train(params, tmp_path / "run", steps=3, console=QUIET)
    gshard.load(tmp_path / "run").export(tmp_path / "weights", "safetensors")
    file = tmp_path / "weights" / "model.safetensors"
    found, arrays = safetensors.numpy.load_file(file), stored(tmp_path / "run")
    assert _metadata(file)["weights"] == "averages over steps"
    assert found.keys() == arrays["theta"].keys()
    assert all(np.array_equal(found[path], arrays["averages"][path]) for path in found)
    assert any(not np.array_equal(found[path], arrays["theta"][path]) for path in found)
    assert not (tmp_path / "weights" / "vocabulary").exists()


def test_large_weights_are_several_files(tmp_path):
    weights = {name: np.full([size], size, np.float32) for name, size in _SIZES.items()}
    groups = safetensors_writer._groups(weights.items(), 64)
    assert [list(group) for group in groups] == [["a", "b"], ["c"], ["d", "e"]]


# Of four bytes each; a file holds 16, and c needs one of its own.
_SIZES = {"a": 8, "b": 8, "c": 20, "d": 4, "e": 4}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
def test_types_are_kept(dtype, tmp_path):
    import ml_dtypes  # noqa: F401  registers bfloat16

    array = np.arange(6).reshape(2, 3).astype(dtype)
    safetensors_writer.save(tmp_path / "a", {"x": array}, {})
    header = (tmp_path / "a").read_bytes()
    size = int.from_bytes(header[:8], "little")
    record = json.loads(header[8 : 8 + size])["x"]
    assert record["shape"] == [2, 3] and header[8 + size :] == array.tobytes()
    assert record["dtype"] == {"bfloat16": "BF16", "float16": "F16", "int32": "I32"}[dtype]


def test_params_become_json():
    params = gshard.experiment("translation.quickstart")
    found = json.loads(to_json(params))
    for path, value in params.leaves():
        node = found
        for name in path.replace("[", ".").replace("]", "").split("."):
            node = node[int(name)] if isinstance(node, list) else node[name]
        if isinstance(value, type):
            assert node == f"{value.__module__}.{value.__qualname__}"
        elif isinstance(value, (bool, int, float, str)):
            assert node == value and type(node) is type(value), path
