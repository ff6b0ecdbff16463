# tests: wings/open_models/families/
"""Tests how many layers configs have, and of which types."""

import pytest

from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from lingvo_gshard.wings.open_models.families import FAMILIES
from lingvo_gshard.wings.open_models.importing import weight_specs
from tests.open_models.test_config import config


@pytest.mark.parametrize(
    ("values", "choosers"),
    [
        ({}, None),
        ({"index_topk_freq": True}, None),
        ({"index_topk_freq": 3}, (0, 1, 1, 1, 4, 4)),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, (0, 0, 0, 3, 3, 3)),
        ({"index_topk_freq": 3, "index_topk_pattern": "FSFSFS"}, (0, 0, 2, 2, 4, 4)),
        ({"indexer_types": ["full", "shared"] * 3, "index_topk_freq": 3}, (0, 0, 2, 2, 4, 4)),
    ],
)
def test_layers_of_glm_5_that_take_a_choice(values, choosers):
    values = {"model_type": "glm_moe_dsa", "num_experts_per_tok": 2} | values
    found = experiment_of(config(num_hidden_layers=6, **values)).task.decoder
    assert (found.choosers if "choosers" in found else None) == choosers


@pytest.mark.parametrize(
    "model_type", ["deepseek_v2", "deepseek_v3", "glm4_moe", "glm_moe_dsa", "hy_v3"]
)
def test_all_layers_may_be_dense(model_type):
    """As in small versions of published models, which keep the number of dense layers."""
    key = {"hy_v3": {"mlp_layer_types": ["dense"] * 5}}
    values = key.get(model_type, {"first_k_dense_replace": 3}) | {"num_experts_per_tok": 2}
    found = experiment_of(config(model_type=model_type, head_dim=64, **values))
    assert (found.task.decoder.moe_every, found.task.decoder.dense_first) == (0, 0)
    paths = [path for path, _ in weight_specs(found).flatten_items()]
    assert not any("experts" in path for path in paths)
    written = FAMILIES[model_type].config_of(found.task)
    assert written.get("mlp_layer_types", ["dense"] * 2) == ["dense"] * 2
    assert FAMILIES[model_type].task_of(PublishedConfig(written, "c")) == found.task


@pytest.mark.parametrize("layers", [{}, {"num_hidden_layers": None}, {"num_hidden_layers": 0}])
def test_the_pattern_of_nemotron_h_says_how_many_layers_there_are(layers):
    values = {"model_type": "nemotron_h", "hybrid_override_pattern": "M*-", "n_groups": 2}
    values |= {"mamba_num_heads": 4, "hidden_size": 8, "num_attention_heads": 2} | layers
    values |= {"num_key_value_heads": 2}
    assert experiment_of(PublishedConfig(values, "c")).task.decoder.num_layers == 3


def test_types_of_layers_have_earlier_names():
    earlier = {"granitemoehybrid": ["mamba", "attention"]}
    earlier["glm_moe_dsa"] = ["deepseek_sparse_attention"] * 2
    earlier["qwen3"] = ["attention"] * 2
    names = {"mamba": "linear_attention", "attention": "full_attention"}
    names["deepseek_sparse_attention"] = "indexed_attention"
    for model_type, kinds in earlier.items():
        values = {"model_type": model_type, "num_experts_per_tok": 2, "mamba_n_heads": 4}
        found, expected = (
            experiment_of(config(**values, layer_types=each)).task
            for each in (kinds, [names[kind] for kind in kinds])
        )
        assert found == expected
