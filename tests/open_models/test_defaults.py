# tests: wings/open_models/families/
"""Compares what missing keys of configs stand for with transformers, as `peer_defaults` recorded.

A config without a key must describe the same model as the config with the value that transformers
gives the key.
"""

import json

import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from lingvo_gshard.wings.open_models.families import FAMILIES, family
from tests.open_models import peer_defaults
from tests.open_models.peer_defaults import REFUSED

RECORDED = json.loads(peer_defaults.FILE.read_text(encoding="utf-8"))
DEFAULTS = RECORDED["defaults"]
# Keys of older files, from which transformers makes other keys, with the values that it then uses.
OLD_KEYS = {
    "default": {"rope_theta": 10000.0},
    "cohere": {"rope_theta": 5e5},
    "ernie4_5": {"rope_theta": 5e5},
    "ernie4_5_moe": {"rope_theta": 5e5},
    "gemma3_text": {"rope_theta": 1e6, "rope_local_base_freq": 10000.0},
    "glm4_moe": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "llama4_text": {"rope_theta": 5e5},
    "gpt_oss": {"rope_theta": 150000.0},
    "minimax_m2": {"rope_theta": 5e6},
    "mixtral": {"rope_theta": 1e6},
    "olmo3": {"rope_theta": 5e5},
    "phimoe": {"rope_theta": 1e6},
    "qwen3_5_moe_text": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "qwen3_5_text": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "qwen3_next": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "smollm3": {"rope_theta": 2e6},
}
# `attribute_map` of these classes has another name for the key.
RENAMED = {"num_nextn_predict_layers": "num_mtp_layers"}
# The classes set these when they are made.
DERIVED = {"rope_parameters": ("gpt_oss",)}
# Keys that have no default of use.
NEEDED = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 8},
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
    old = OLD_KEYS.get(name, OLD_KEYS["default"])
    for key, value in FAMILIES[name].defaults.items():
        if key in old:
            assert value == old[key], key
        elif name not in DERIVED.get(key, ()):
            assert value == DEFAULTS[name][RENAMED.get(key, key)], key


@pytest.mark.parametrize("name", TYPES)
def test_every_key_of_the_class_is_stated_or_known(name):
    """A key that a family neither reads nor knows may not be a key of the class."""
    stated = FAMILIES[name].defaults
    rest = {k: v for k, v in DEFAULTS[name].items() if RENAMED.get(k, k) not in stated}
    config = PublishedConfig({"model_type": name} | rest | NEEDED.get(name, {}), "config.json")
    experiment_of(config)


def test_the_version_of_transformers_is_the_recorded_one():
    assert RECORDED["transformers"] == family.TRANSFORMERS


@pytest.mark.parametrize("name", RECORDED["cases"])
def test_a_missing_key_is_a_default_of_transformers(name):
    case = RECORDED["cases"][name]
    whole = case["whole"]
    given = next(c.values for c in peer_defaults.CASES if c.name == name)
    assert experiment({"model_type": whole["model_type"], **given}) == experiment(whole)
    defaults, checked = DEFAULTS[whole["model_type"]], 0
    for key in whole.keys() - {"model_type", *peer_defaults.UNRECORDED}:
        change = case["missing"].get(key)
        change = {key: defaults[key]} if change is None else change
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
