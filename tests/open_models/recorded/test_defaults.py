# tests: wings/open_models/families/
"""Compares what missing keys of configs stand for with transformers, as `defaults` recorded.

A config without a key must describe the same model as the config with the value that transformers
gives the key.
"""

import json

import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from lingvo_gshard.wings.open_models.families import FAMILIES, family
from tests.open_models.recorded import defaults
from tests.open_models.recorded.defaults import REFUSED

RECORDED = json.loads(defaults.FILE.read_text(encoding="utf-8"))
DEFAULTS = RECORDED["defaults"]
# The classes set these when they are made.
DERIVED = ("per_layer_config", "rope_parameters")
# Keys that have no default of use.
NEEDED = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 8},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
}
# transformers has these only as the families that they equal.
TYPES = [name for name in FAMILIES if name not in ("kimi_k2", "mimo")]


def experiment(values):
    return experiment_of(PublishedConfig(values, "config.json"))


def described(values):
    """Returns the Params of a config, or None if it is refused."""
    try:
        return experiment(values)
    except UserError:
        return None


@pytest.mark.parametrize("name", TYPES)
def test_stated_defaults_are_those_of_transformers(name):
    stated = family.class_keys().keys[name]
    for key in stated.keys() & DEFAULTS[name].keys() - set(DERIVED):
        assert stated[key] == DEFAULTS[name][key], key


@pytest.mark.parametrize("name", TYPES)
def test_a_config_with_all_keys_of_the_class_is_taken(name):
    values = {"model_type": name} | DEFAULTS[name] | NEEDED.get(name, {})
    experiment_of(PublishedConfig(values, "config.json"))


def test_the_version_of_transformers_is_the_recorded_one():
    assert RECORDED["transformers"] == family.class_keys().transformers


@pytest.mark.parametrize("name", RECORDED["cases"])
def test_a_missing_key_is_a_default_of_transformers(name):
    case = RECORDED["cases"][name]
    whole = case["whole"]
    given = next(c.values for c in defaults.CASES if c.name == name)
    assert experiment({"model_type": whole["model_type"], **given}) == experiment(whole)
    values, checked = DEFAULTS[whole["model_type"]], 0
    for key in whole.keys() - {"model_type", *defaults.UNRECORDED}:
        change = case["missing"].get(key)
        change = {key: values[key]} if change is None else change
        without = {k: v for k, v in whole.items() if k != key}
        if change != REFUSED:
            expected = described(whole | change)
            # Of a file with two keys that contradict each other, transformers takes one.
            assert expected is None or described(without) == expected, key
            checked += expected is not None
    assert checked > 10


@pytest.mark.parametrize("name", RECORDED["cases"])
def test_null_is_what_transformers_makes_of_it(name):
    case = RECORDED["cases"][name]
    whole = case["whole"]
    for key, change in case["null"].items():
        found = described(whole | {key: None})
        assert found is None or found == described(whole | change), key


@pytest.mark.parametrize("written", RECORDED["written"], ids=lambda w: json.dumps(w["given"]))
def test_configs_of_older_versions_are_what_transformers_makes_of_them(written):
    if written["whole"] == REFUSED:
        assert described(written["given"]) is None
    else:
        assert experiment(written["given"]) == experiment(written["whole"])


def test_null_makes_all_of_a_head_rotate_in_glm4():
    """transformers would read the config that it writes of this one as half of a head."""
    task = experiment({"model_type": "glm4_moe", "partial_rotary_factor": None}).task
    assert task.decoder.layer.self_attention.rotary_fraction == 1.0
