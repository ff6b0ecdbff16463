"""Gemma 2 (arXiv 2408.00118) and the text models of Gemma 3 (arXiv 2503.19786)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.families.decoder import (
    ATTENTION,
    EMBEDDINGS,
    FEED_FORWARD,
    HEAD_NORMS,
    plain_config,
    plain_task,
)
from lingvo_gshard.open_models.families.family import (
    FULL,
    SLIDING,
    Family,
    layer_types,
    pattern_config,
    set_pattern,
)
from lingvo_gshard.open_models.families.rope import rope_config, set_rope
from lingvo_gshard.open_models.table import TensorPattern

_NORMS = tuple(
    TensorPattern(
        f"model.layers.{{layer}}.{published}.weight", f"decoder.{{layer}}.{ours}.scale", "M->M"
    )
    for published, ours in (
        ("input_layernorm", "self_attention_norm"),
        ("post_attention_layernorm", "self_attention_output_norm"),
        ("pre_feedforward_layernorm", "feed_forward_norm"),
        ("post_feedforward_layernorm", "feed_forward_output_norm"),
    )
)
_TABLE = (*EMBEDDINGS, *ATTENTION, *_NORMS, *FEED_FORWARD)
_GELU = "gelu_pytorch_tanh"
# The rotary bases of Gemma 3: in layers with a window, and in layers with full attention.
_LOCAL_BASE, _GLOBAL_BASE = 1e4, 1e6


def _common(config: PublishedConfig) -> Params:
    """Returns what Gemma 2 and 3 share, with attentions that have neither window nor rotation."""
    config.expect("attention_bias", False)
    config.expect("use_bidirectional_attention", False)
    config.expect("hidden_activation", _GELU)
    for name in ("hidden_act", "cache_implementation"):
        # Some configs also have these keys; no model reads them.
        config.get(name, None)
    task = plain_task(config, ties_by_default=True)
    layer = task.decoder.layer
    layer.norm_position = "both"
    layer.norm.zero_centered = True
    layer.feed_forward.activation = "geglu_tanh"
    layer.self_attention.set(
        query_scale=config.get("query_pre_attn_scalar", 256.0, least=1) ** -0.5,
        logit_cap=config.get("attn_logit_softcapping", 0.0),
    )
    # 0 stands for the square root of the model dimension.
    return task.set(embedding_scale=0.0, logit_cap=config.get("final_logit_softcapping", 0.0))


def _common_config(task: Params) -> dict[str, Any]:
    decoder = task.decoder
    attention = (decoder.attention_pattern or (decoder.layer.self_attention,))[0]
    scale = attention.query_scale or (attention.head_dim or task.model_dim) ** -0.5
    windows = [each.window for each in decoder.attention_pattern or (attention,)]
    return {
        **plain_config(task),
        "hidden_activation": _GELU,
        "attention_bias": False,
        "query_pre_attn_scalar": round(scale**-2, 6),
        "attn_logit_softcapping": attention.logit_cap or None,
        "final_logit_softcapping": task.logit_cap or None,
        "sliding_window": max(windows) + 1,
        "layer_types": pattern_config(decoder),
    }


def _attentions(config: PublishedConfig, attention: Params) -> dict[str, Params]:
    """Returns type -> Params of the self-attention, with windows."""
    # A published window counts the position itself; ours is the largest distance.
    window = config.get("sliding_window", 4096) - 1
    return {SLIDING: attention.copy().set(window=window), FULL: attention.copy()}


def _gemma2_task(config: PublishedConfig) -> Params:
    task = _common(config)
    attention = task.decoder.layer.self_attention
    set_rope(config, attention, config.rope())
    kinds = layer_types(config, usual_period=2)
    set_pattern(config, task.decoder, kinds, _attentions(config, attention))
    return task


def _gemma2_config(task: Params) -> dict[str, Any]:
    return {**_common_config(task), **rope_config(task.decoder.layer.self_attention)}


def _gemma3_task(config: PublishedConfig) -> Params:
    task = _common(config)
    attention = task.decoder.layer.self_attention
    attention.qk_norm = True
    attention.query_key_norm.set(epsilon=config.get("rms_norm_eps", kind=float), zero_centered=True)
    attentions, rope = _attentions(config, attention), config.rope()
    local = {"rope_theta": config.get("rope_local_base_freq", _LOCAL_BASE)}
    if FULL in rope:
        rope, local = rope[FULL], rope[SLIDING]
    else:
        rope["rope_theta"] = config.get("rope_theta", _GLOBAL_BASE)
    set_rope(config, attentions[FULL], rope)
    set_rope(config, attentions[SLIDING], local)
    kinds = layer_types(config, usual_period=6)
    set_pattern(config, task.decoder, kinds, attentions)
    return task


def _gemma3_config(task: Params) -> dict[str, Any]:
    decoder = task.decoder
    pattern = decoder.attention_pattern or (decoder.layer.self_attention,)
    ropes = {
        SLIDING if attention.window else FULL: rope_config(attention)["rope_parameters"]
        for attention in pattern
    }
    ropes.setdefault(SLIDING, {"rope_type": "default", "rope_theta": _LOCAL_BASE})
    ropes.setdefault(FULL, {"rope_type": "default", "rope_theta": _GLOBAL_BASE})
    return {**_common_config(task), "rope_parameters": ropes}


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    table=_TABLE,
    task_of=_gemma2_task,
    config_of=_gemma2_config,
)
GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    table=(*_TABLE, *HEAD_NORMS),
    task_of=_gemma3_task,
    config_of=_gemma3_config,
)
