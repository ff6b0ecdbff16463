"""gpt-oss: experts with biases and clamped gates, attention sinks (arXiv 2508.10925)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.families.decoder import (
    ATTENTION,
    ATTENTION_BIASES,
    DECODER_DEFAULTS,
    EMBEDDINGS,
    NORMS,
    decoder_task,
    plain_config,
)
from lingvo_gshard.open_models.families.experts import local_experts, local_experts_config
from lingvo_gshard.open_models.families.family import (
    Family,
    attentions_by_type,
    layer_types,
    pattern_config,
    pattern_of,
    set_pattern,
    window_config,
)
from lingvo_gshard.open_models.families.rope import rope_config
from lingvo_gshard.open_models.table import TensorPattern

_MLP, _OURS = "model.layers.{layer}.mlp", "decoder.{layer}.feed_forward"
# Gates and factors are published as neighbors in one tensor.
_PAIRS = (("in", 0), ("factor", 1))
_EXPERTS = (
    TensorPattern(f"{_MLP}.router.weight", f"{_OURS}.router.w_gate", "EM->ME"),
    TensorPattern(f"{_MLP}.router.bias", f"{_OURS}.router.b_gate", "E->E"),
    *(
        TensorPattern(
            f"{_MLP}.experts.gate_up_proj",
            f"{_OURS}.experts.w_{name}",
            "EM(Hg)->EMH",
            (("g", index, len(_PAIRS)),),
        )
        for name, index in _PAIRS
    ),
    *(
        TensorPattern(
            f"{_MLP}.experts.gate_up_proj_bias",
            f"{_OURS}.experts.b_{name}",
            "E(Hg)->EH",
            (("g", index, len(_PAIRS)),),
        )
        for name, index in _PAIRS
    ),
    TensorPattern(f"{_MLP}.experts.down_proj", f"{_OURS}.experts.w_out", "EHM->EHM"),
    TensorPattern(f"{_MLP}.experts.down_proj_bias", f"{_OURS}.experts.b_out", "EM->EM"),
)
_SINKS = TensorPattern(
    "model.layers.{layer}.self_attn.sinks", "decoder.{layer}.self_attention.sinks", "N->N"
)
_DEFAULTS = DECODER_DEFAULTS | {
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "rope_theta": 150000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
}


def _task(config: PublishedConfig) -> Params:
    task = decoder_task(config)
    decoder, attention = task.decoder, task.decoder.layer.self_attention
    has_bias = config.get("attention_bias", False)
    attention.set(use_bias=has_bias, use_output_bias=has_bias, use_sinks=True)
    kinds = layer_types(config, period=2)
    set_pattern(config, decoder, kinds, attentions_by_type(config, attention))
    for name in ("initial_context_length", "experts_per_token"):
        # The first is also in the rotary parameters, the second is num_experts_per_tok.
        config.get(name, None)
    decoder.moe_every = 1
    decoder.moe = local_experts(config, decoder)
    decoder.moe.router.use_bias = True
    decoder.moe.experts.set(
        use_bias=True,
        activation="clamped_swiglu",
        gate_alpha=config.get("swiglu_alpha", kind=float),
        gate_limit=config.get("swiglu_limit", kind=float),
    )
    return task


def _config(task: Params) -> dict[str, Any]:
    decoder = task.decoder
    pattern = pattern_of(decoder)
    moe = decoder.moe
    return {
        **plain_config(task),
        **rope_config(pattern[0]),
        "hidden_act": "silu",
        "attention_bias": pattern[0].use_bias,
        "sliding_window": window_config(pattern),
        "layer_types": pattern_config(decoder),
        **local_experts_config(decoder),
        "swiglu_alpha": moe.experts.gate_alpha,
        "swiglu_limit": moe.experts.gate_limit,
    }


FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    table=(*EMBEDDINGS, *ATTENTION, *ATTENTION_BIASES, _SINKS, *NORMS, *_EXPERTS),
    read_task=_task,
    config_of=_config,
    defaults=_DEFAULTS,
    aliases={"num_experts": "num_local_experts"},
)
