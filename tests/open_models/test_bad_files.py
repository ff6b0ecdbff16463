# tests: wings/open_models/importing.py, wings/open_models/shards.py
"""Tests files of weights and tokenizers that are damaged, missing, or not those of the config."""

import json
import os
import pathlib

import numpy as np
import pytest
import safetensors.numpy

import lingvo_gshard as gshard
from tests.open_models import published

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"


def change(**tensors):
    """Returns a step that replaces tensors of a model in one file; None removes one."""

    def step(directory):
        file = directory / "model.safetensors"
        found = safetensors.numpy.load_file(file)
        for name, value in tensors.items():
            found.pop(name, None)
            if value is not None:
                found[name] = value
        safetensors.numpy.save_file(found, file)

    return step


def cut(name):
    return lambda directory: os.truncate(directory / name, (directory / name).stat().st_size - 8)


def remove(name):
    return lambda directory: (directory / name).unlink()


def only_pickles(directory):
    remove("model.safetensors")(directory)
    (directory / "pytorch_model.bin").write_bytes(b"no one reads this")


def twice_in_a_header(directory):
    file = directory / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].rstrip()
    entry = b'"lm_head.weight":{"dtype":"F32","shape":[],"data_offsets":[0,0]},'
    header = b"{" + entry + header[1:]
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])


def twice_in_files(directory):
    one = published.tensors()["lm_head.weight"]
    safetensors.numpy.save_file({"lm_head.weight": one}, directory / "more.safetensors")


def edit_index(edit):
    def step(directory):
        path = directory / INDEX
        index = json.loads(path.read_text())
        edit(index["weight_map"])
        path.write_text(json.dumps(index))

    return step


NORM = "model.norm.weight"
CASES = {
    "missing": (1, change(**{NORM: None}), f"{NORM} is missing"),
    "unknown": (
        1,
        change(**{"model.norm.bias": np.zeros(8, np.float32)}),
        f"model.norm.bias is unknown. Did you mean '{NORM}'?",
    ),
    "shape": (1, change(**{NORM: np.zeros(9, np.float32)}), f"{NORM} is (9,); (8,) was expected"),
    "type": (1, change(**{NORM: np.zeros(8, np.int8)}), f"{NORM} has the type I8; one of F64, "),
    "cut off": (1, cut("model.safetensors"), "is damaged or cut off"),
    "no header": (1, lambda d: os.truncate(d / "model.safetensors", 100), "is damaged: it is cut"),
    "a pickle": (1, only_pickles, "is a pickle, which may run code when it is read. Convert it to"),
    "no weights": (1, remove("model.safetensors"), "has no .safetensors files"),
    "twice in a file": (1, twice_in_a_header, "is damaged: lm_head.weight occurs twice"),
    "in two files": (1, twice_in_files, "lm_head.weight is in model.safetensors and in more.safe"),
    "no tokenizer": (1, remove("tokenizer.json"), "has no tokenizer: tokenizer.json or tokenizer"),
    "a bad tokenizer": (
        1,
        lambda d: (d / "tokenizer.json").write_text("{}"),
        "tokenizer.json is no tokenizer",
    ),
    "a missing file": (2, remove(FIRST), f"names {FIRST}, which is missing"),
    "another file": (
        2,
        edit_index(lambda m: m.update({NORM: next(f for f in m.values() if f != m[NORM])})),
        f"{NORM} should be in ",
    ),
    "not in the index": (2, edit_index(lambda m: m.pop(NORM)), f"lacks {NORM}, which model-0000"),
    "outside": (
        2,
        edit_index(lambda m: m.update({NORM: "../x"})),
        "names '../x'; files of its own",
    ),
    "no index": (2, lambda d: (d / INDEX).write_text("{"), "is no index of safetensors"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_files_are_refused_before_anything_is_written(name, tmp_path):
    shards, step, message = CASES[name]
    published.write(tmp_path / "model", shards=shards)
    step(tmp_path / "model")
    with pytest.raises(ValueError) as error:
        gshard.import_model(tmp_path / "model", tmp_path / "run")
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_directory_that_exists_is_not_overwritten(tmp_path):
    published.write(tmp_path / "model")
    with pytest.raises(ValueError, match="exists already; give the name of a new directory"):
        gshard.import_model(tmp_path / "model", tmp_path / "model")
    with pytest.raises(ValueError, match="there is no such file"):
        gshard.import_model(pathlib.Path("nowhere"), tmp_path / "run")


def test_a_disk_that_is_too_small_is_noticed(tmp_path, monkeypatch):
    published.write(tmp_path / "model")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match="MB needed"):
        gshard.import_model(tmp_path / "model", tmp_path / "run")


def test_weights_in_the_form_of_another_library_are_not_read(tmp_path):
    """Mistral publishes consolidated.safetensors beside the file of transformers."""
    tensors = published.write(tmp_path / "model")
    other = {"layers.0.attention.wq.weight": tensors["model.layers.0.self_attn.q_proj.weight"]}
    safetensors.numpy.save_file(other, tmp_path / "model" / "consolidated.safetensors")
    found = gshard.import_model(tmp_path / "model", tmp_path / "run")
    assert found.tensors == len(tensors)
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="model.embed_tokens.weight is missing"):
        gshard.import_model(tmp_path / "model", tmp_path / "other")
