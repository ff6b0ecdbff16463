# tests: wings/open_models/shards.py, wings/open_models/experiment.py, wings/open_models/config.py
"""Fuzzes files of published models: whatever they hold, a sentence names the file."""

import functools
import json
import pathlib
import random

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from lingvo_gshard.wings.open_models.shards import INDEX_FILE, read_headers
from tests.open_models import published

CONFIGS = sorted((pathlib.Path(__file__).parents[2] / "docs/planned/configs").glob("*.json"))
VALUES = st.sampled_from(
    [None, True, False, 0, -1, 1, 7, 3.5, 1e30, float("nan"), 10**30, "", "x", "4096"]
    + [[], [1], [[]], ["full_attention"], {}, {"a": 1}]
)
DEEP = "[" * 100_000 + "]" * 100_000


@functools.cache
def read(path: pathlib.Path) -> str:
    return path.read_text()


def change(data, values):
    """Replaces or removes one value of a config, or of an object in it."""
    key = data.draw(st.sampled_from(sorted(values)))
    if isinstance(values[key], dict) and values[key] and data.draw(st.booleans()):
        change(data, values[key])
    elif data.draw(st.integers(0, 5)) == 0:
        del values[key]
    else:
        values[key] = data.draw(VALUES)


def check_config(data):
    path = data.draw(st.sampled_from(CONFIGS))
    values = json.loads(read(path))
    for _ in range(data.draw(st.integers(1, 3))):
        if values:
            change(data, values)
    try:
        params = experiment_of(PublishedConfig(values, "the config"))
    except ValueError as error:
        # Ours, or those of Params; a library's would name nothing that a user knows.
        assert "the config" in str(error) or "expected" in str(error), error
    else:
        assert params.task.to_text()


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(data=st.data())
def test_changed_configs_are_read_or_refused(data):
    check_config(data)


@pytest.mark.slow
@hypothesis.settings(max_examples=5_000, deadline=None)
@hypothesis.given(data=st.data())
def test_many_changed_configs_are_read_or_refused(data):
    check_config(data)


@pytest.mark.parametrize("name", ["config.json", INDEX_FILE])
def test_json_that_is_too_deep_is_refused(tmp_path, name):
    published.write(tmp_path / "model", shards=2)
    path = tmp_path / "model" / name
    path.write_text('{"weight_map": ' + DEEP + "}")
    with pytest.raises(ValueError, match=name):
        PublishedConfig.load(tmp_path / "model")
        read_headers(tmp_path / "model")


@pytest.mark.parametrize(
    "weight_map",
    [None, 3, "x", [], ["a"], {"a": 3}, {"a": None}, {"a": ["b"]}, {"a": "b\0c"}, {"a": ""}],
)
def test_odd_weight_maps_are_refused(tmp_path, weight_map):
    published.write(tmp_path / "model", shards=2)
    (tmp_path / "model" / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json|is in model-0"):
        read_headers(tmp_path / "model")


@pytest.mark.parametrize("seed", range(100))
def test_damaged_headers_are_read_or_refused(tmp_path_factory, seed):
    directory = tmp_path_factory.mktemp("model") / "model"
    published.write(directory)
    file = directory / "model.safetensors"
    content = bytearray(file.read_bytes())
    rng = random.Random(seed)
    size = 8 + int.from_bytes(content[:8], "little")
    for _ in range(rng.choice([1, 1, 2, 8])):
        content[rng.randrange(size)] = rng.randrange(256)
    file.write_bytes(content)
    try:
        tensors = read_headers(directory)
    except ValueError as error:
        assert str(directory) in str(error)
    else:
        assert tensors
