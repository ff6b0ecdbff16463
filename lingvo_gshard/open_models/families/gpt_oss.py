"""gpt-oss: experts with biases and clamped gates, attention sinks (arXiv 2508.10925)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.families.decoder import (
    ATTENTION,
    ATTENTION_BIASES,
    EMBEDDINGS,
    NORMS,
    decoder_task,
    plain_config,
)
from lingvo_gshard.open_models.families.experts import loss_coefficient, loss_weight, top_k_experts
from lingvo_gshard.open_models.families.family import (
    FULL,
    SLIDING,
    Family,
    layer_types,
    pattern_config,
    set_pattern,
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


def _task(config: PublishedConfig) -> Params:
    task = decoder_task(config)
    decoder, attention = task.decoder, task.decoder.layer.self_attention
    has_bias = config.get("attention_bias", True)
    attention.set(use_bias=has_bias, use_output_bias=has_bias, use_sinks=True)
    window = config.get("sliding_window", 128) - 1
    kinds = layer_types(config, usual_period=2)
    attentions = {SLIDING: attention.copy().set(window=window), FULL: attention.copy()}
    set_pattern(config, decoder, kinds, attentions)
    for name in ("initial_context_length", "experts_per_token"):
        # The first is also in the rotary parameters, the second is num_experts_per_tok.
        config.get(name, None)
    decoder.moe_every = 1
    k = config.get("num_experts_per_tok")
    decoder.moe = top_k_experts(
        experts=config.get("num_local_experts"),
        k=k,
        hidden_dim=config.get("intermediate_size"),
        normalize=True,
        balance_weight=loss_weight(config.get("router_aux_loss_coef", 0.001), decoder, k),
    )
    decoder.moe.router.use_bias = True
    decoder.moe.experts.set(
        use_bias=True,
        activation="clamped_swiglu",
        gate_alpha=config.get("swiglu_alpha", 1.702),
        gate_limit=config.get("swiglu_limit", 7.0),
    )
    return task


def _config(task: Params) -> dict[str, Any]:
    decoder = task.decoder
    pattern = decoder.attention_pattern or (decoder.layer.self_attention,)
    moe = decoder.moe
    return {
        **plain_config(task),
        **rope_config(pattern[0]),
        "hidden_act": "silu",
        "attention_bias": pattern[0].use_bias,
        "sliding_window": max(attention.window for attention in pattern) + 1,
        "layer_types": pattern_config(decoder),
        "intermediate_size": moe.hidden_dim,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.router.k,
        "router_aux_loss_coef": loss_coefficient(
            moe.router.auxiliary_loss_weight, decoder, moe.router.k
        ),
        "swiglu_alpha": moe.experts.gate_alpha,
        "swiglu_limit": moe.experts.gate_limit,
    }


FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    table=(*EMBEDDINGS, *ATTENTION, *ATTENTION_BIASES, _SINKS, *NORMS, *_EXPERTS),
    task_of=_task,
    config_of=_config,
)
