# tests: wings/open_models/families/deepseek/deepseek_v3.py
# tests: wings/published_layers/indexed_attention.py
"""A training step of a small GLM-5.2 over eight devices equals one on one device, in float64."""

import pytest

from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from tests.open_models.over_meshes.steps import MESHES, verified

CONFIG = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16,
    "q_lora_rank": 8,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "index_topk": 4,
    "index_head_dim": 4,
    "index_n_heads": 8,
    "index_topk_freq": 2,
    "index_skip_topk_offset": 3,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}


def experiment():
    return experiment_of(PublishedConfig(CONFIG, "config.json"), length=12)


def test_a_loop_begins_with_a_layer_that_chooses():
    stack = experiment().task.decoder
    assert stack.choosers == (0, 1, 2, 2, 4, 4, 6, 6)
    assert (stack.dense_first, stack.sequential_first, len(stack.attention_pattern)) == (3, 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in MESHES if case != "pipeline"])
def test_a_step_is_that_of_one_device(case):
    mesh, strategy, execution = MESHES[case]
    params = experiment()
    params.task.decoder.execution = execution
    verified(params, mesh, strategy)
