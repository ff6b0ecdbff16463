# tests: wings/open_models/families/gemma.py, wings/published_layers/gemma4.py
"""A training step of a small Gemma 4 over eight devices equals one on one device, in float64."""

import pytest

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from tests.layers.stacks.executions import loop, sequential
from tests.open_models.over_meshes.steps import verified

DENSE = {
    "model_type": "gemma4_text",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "head_dim": 4,
    "global_head_dim": 8,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
    "final_logit_softcapping": 8.0,
    "max_position_embeddings": 16,
}
EXPERTS = DENSE | {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
# As E2B: layers borrow keys of earlier ones, and have inputs of their own.
SHARING = DENSE | {
    "num_hidden_layers": 5,
    "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 48,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
# Name -> config, mesh, strategy, how the layers are run.
CASES = {
    "dense, fsdp": (DENSE, "data=8", "fsdp", loop("full")),
    "dense, tensor": (DENSE, "data=4,model=2", "data_tensor", loop("products")),
    "experts, data": (EXPERTS, "data=8", "data", loop("full")),
    "experts, fsdp": (EXPERTS, "data=8", "fsdp", sequential("products")),
    "experts, tensor": (EXPERTS, "data=2,model=4", "expert_tensor", loop("products")),
    "shared keys, data": (SHARING, "data=8", "data", sequential("full")),
    "shared keys, fsdp": (SHARING, "data=8", "fsdp", sequential("products")),
    "shared keys, tensor": (SHARING, "data=4,model=2", "data_tensor", sequential()),
}


def experiment(config: dict, execution: Params) -> Params:
    params = experiment_of(PublishedConfig(config, "config.json"), length=12)
    params.task.decoder.execution = execution
    return params


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_one_device(case):
    config, mesh, strategy, execution = CASES[case]
    verified(experiment(config, execution), mesh, strategy)
