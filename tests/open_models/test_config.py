"""Tests configs: what they stand for, and what is refused."""

import json

import pytest

from benchmarks.parity.cases import CASES
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.experiment import experiment_of
from lingvo_gshard.open_models.families import FAMILIES
from lingvo_gshard.open_models.families.family import extra_layers
from lingvo_gshard.open_models.importing import weight_specs
from lingvo_gshard.open_models.weight_mapping import WeightMapping
from tests.open_models.published import CONFIG


def config(**values):
    return PublishedConfig(CONFIG | values, "config.json")


def case_config(case):
    norm = {} if case.start else {"rms_norm_eps": 1e-6}
    return PublishedConfig({"model_type": case.model_type} | norm | case.values, "c")


def test_a_config_is_an_experiment():
    task = experiment_of(config()).task
    assert (task.model_dim, task.decoder.num_layers, task.tie_softmax) == (8, 2, False)
    attention = task.decoder.layer.self_attention
    assert (attention.head_dim, attention.num_key_value_heads) == (4, 2)
    assert task.decoder.layer.norm.epsilon == 1e-5


def test_the_forms_of_rotary_parameters_are_equal():
    scaling = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0}
    old = config(rope_scaling={"type": "yarn", **scaling})
    new = config(
        rope_theta=None, rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, **scaling}
    )
    assert experiment_of(old).task == experiment_of(new).task
    found = experiment_of(old).task.decoder.layer.self_attention
    assert found.rotary_base == 100.0
    assert (found.rotary_scaling.factor, found.rotary_scaling.beta_fast) == (4.0, 16.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_task_gives_the_config_that_it_was_made_from(case):
    family, read = FAMILIES[case.model_type], case_config(case)
    task = family.task_of(read)
    family.left_out(read)
    read.check_all_read()
    described = PublishedConfig(family.config_of(task), "described")
    # Where the original length of a scaling is the number of positions.
    described.values.setdefault("max_position_embeddings", 0)
    assert family.task_of(described) == task
    described.check_all_read()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_weight_has_a_tensor(case):
    params = experiment_of(case_config(case))
    mapping = WeightMapping.of(FAMILIES[case.model_type].table, weight_specs(params))
    assert all(mapping.of_weights().values())
    assert ("lm_head.weight" in mapping.pieces) is not params.task.tie_softmax


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "lama"}, "the architecture 'lama' is unknown. Did you mean 'llama'?"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', which is not supported; 'silu' was exp"),
        ({"hidden_size": None}, "config.json lacks hidden_size, which this family needs"),
        ({"residual_scale": 2.0}, "residual_scale=2.0 may change what the model computes"),
        ({"rope_scaling": {"type": "yarm"}}, "the rope_type 'yarm' is unknown. Did you mean 'yarn"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "attn_factor": 1.0}},
            "the rotary parameters attn_factor are unknown for the rope_type 'linear'",
        ),
    ],
)
def test_what_is_not_supported_is_refused(values, message):
    with pytest.raises(ValueError) as error:
        experiment_of(config(**values))
    assert message in str(error.value)


def test_clipped_queries_are_refused():
    case = next(case for case in CASES if case.model_type == "olmoe")
    values = {"model_type": "olmoe", "rms_norm_eps": 1e-5, **case.values, "clip_qkv": 8.0}
    with pytest.raises(ValueError, match=r"clip_qkv is 8\.0, which is not supported"):
        experiment_of(PublishedConfig(values, "config.json"))


def test_layers_that_predict_further_tokens_are_left_out():
    values = {"num_hidden_layers": 4, "num_nextn_predict_layers": 2}
    found = extra_layers(PublishedConfig(values, "config.json"))
    assert found == ("model.layers.4.", "model.layers.5.")


def test_a_length_beyond_the_models_is_refused():
    with pytest.raises(ValueError, match="`length=33` is more than the 32 positions"):
        experiment_of(config(), length=33)


def test_files_that_are_no_config_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: there is no such file"):
        PublishedConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list; a JSON object was expected"):
        PublishedConfig.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG)[:-5])
    with pytest.raises(ValueError, match="is no JSON"):
        PublishedConfig.load(tmp_path)
