"""dots.llm1: Qwen3's attention with DeepSeek-V3's experts (arXiv 2506.05767)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import (
    DECODER,
    DECODER_DEFAULTS,
    decoder_config,
    decoder_task,
)
from lingvo_gshard.wings.open_models.families.experts import (
    SHARED_EXPERT,
    expert_rows,
    set_sigmoid_experts,
    sigmoid_config,
)
from lingvo_gshard.wings.open_models.families.family import (
    BIASES,
    FULL,
    SLIDING,
    Family,
    attentions_by_type,
    run_in_periods,
    set_pattern,
    types_of_layers,
    windows_config,
)

_DEFAULTS = DECODER_DEFAULTS | {
    "attention_bias": False,
    "first_k_dense_replace": 0,
    "hidden_size": 4608,
    "intermediate_size": 10944,
    "max_window_layers": 62,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": None,
    "n_shared_experts": None,
    "norm_topk_prob": False,
    "num_experts_per_tok": None,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "routed_scaling_factor": 1.0,
    "sliding_window": 4096,
    "topk_group": 1,
    "vocab_size": 152064,
}


def _task(config: PublishedConfig) -> Params:
    task = decoder_task(config, BIASES)
    # The names that published files have for what the class does.
    config.expect("scoring_func", "sigmoid", "noaux_tc")
    config.expect("topk_method", "noaux_tc")
    decoder, attention = task.decoder, task.decoder.layer.self_attention
    attention.qk_norm = True
    attention.query_key_norm.epsilon = config.get("rms_norm_eps", kind=float)
    first = config.get("max_window_layers", decoder.num_layers, least=0)
    has_window = config.get("sliding_window", None, int) is not None
    usual = [
        SLIDING if has_window and index >= first else FULL for index in range(decoder.num_layers)
    ]
    attentions = attentions_by_type(config, attention)
    set_pattern(config, decoder, types_of_layers(config, usual), attentions)
    set_sigmoid_experts(config, decoder)
    run_in_periods(decoder)
    return task


def _config(task: Params) -> dict[str, Any]:
    return {
        **decoder_config(task, BIASES),
        **sigmoid_config(task.decoder),
        **windows_config(task.decoder),
    }


FAMILY = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    table=(*DECODER, *expert_rows("mlp"), *SHARED_EXPERT),
    read_task=_task,
    config_of=_config,
    defaults=_DEFAULTS,
    aliases={"num_local_experts": "n_routed_experts"},
)
