"""Gemma (arXiv 2403.08295), Gemma 2 (2408.00118) and the text models of Gemma 3 (2503.19786)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import (
    ATTENTION,
    DECODER,
    DECODER_DEFAULTS,
    EMBEDDINGS,
    FEED_FORWARD,
    HEAD_NORMS,
    NORMS,
    OUTPUT_NORMS,
    layer_row,
    plain_config,
    plain_task,
)
from lingvo_gshard.wings.open_models.families.family import (
    FULL,
    SLIDING,
    Family,
    attentions_by_type,
    layer_types,
    pattern_of,
    set_pattern,
    windows_config,
)
from lingvo_gshard.wings.open_models.families.rope import (
    rope_config,
    ropes_config,
    rotated_by_type,
    set_rope,
)

_NORMS = (
    NORMS[0],
    *OUTPUT_NORMS,
    layer_row("pre_feedforward_layernorm.weight", "feed_forward_norm.scale", "M->M"),
)
_TABLE = (*EMBEDDINGS, *ATTENTION, *_NORMS, *FEED_FORWARD)
_GELU = "gelu_pytorch_tanh"
# The rotary bases of Gemma 3: in layers with a window, and in layers with full attention.
_LOCAL_BASE, _GLOBAL_BASE = 1e4, 1e6
_DEFAULTS = DECODER_DEFAULTS | {
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": _GELU,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": None,
    "vocab_size": 256000,
}
_GEMMA_DEFAULTS = DECODER_DEFAULTS | {
    "attention_bias": False,
    "head_dim": 256,
    "hidden_act": _GELU,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": None,
    "vocab_size": 256000,
}
_GEMMA3_DEFAULTS = _DEFAULTS | {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "max_position_embeddings": 131072,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1e6,
    "use_bidirectional_attention": False,
    "vocab_size": 262208,
}


def _of_all(config: PublishedConfig) -> Params:
    """Returns what all generations share, without rotations."""
    config.expect("attention_bias", False)
    config.expect("use_bidirectional_attention", False)
    task = plain_task(config)
    task.decoder.layer.norm.zero_centered = True
    task.decoder.layer.feed_forward.activation = "geglu_tanh"
    # 0 stands for the square root of the model dimension.
    return task.set(embedding_scale=0.0)


def _common(config: PublishedConfig) -> Params:
    """Returns what Gemma 2 and 3 share, with attentions that have neither window nor rotation."""
    config.expect("hidden_activation", _GELU)
    for name in ("hidden_act", "cache_implementation"):
        # Some configs also have these keys; no model reads them.
        config.get(name, None)
    task = _of_all(config)
    layer = task.decoder.layer
    layer.norm_position = "both"
    layer.self_attention.set(
        query_scale=config.get("query_pre_attn_scalar", kind=float, least=1) ** -0.5,
        logit_cap=config.get("attn_logit_softcapping", 0.0),
    )
    return task.set(logit_cap=config.get("final_logit_softcapping", 0.0))


def _common_config(task: Params) -> dict[str, Any]:
    decoder = task.decoder
    attention = pattern_of(decoder)[0]
    scale = attention.query_scale or (attention.head_dim or task.model_dim) ** -0.5
    return {
        **plain_config(task),
        "hidden_activation": _GELU,
        "attention_bias": False,
        "query_pre_attn_scalar": round(scale**-2, 6),
        "attn_logit_softcapping": attention.logit_cap or None,
        "final_logit_softcapping": task.logit_cap or None,
        **windows_config(decoder),
    }


def _gemma2_task(config: PublishedConfig) -> Params:
    task = _common(config)
    attention = task.decoder.layer.self_attention
    set_rope(config, attention, config.rope())
    pattern = config.get("sliding_window_pattern", 2)
    if pattern != 2 and not config.is_given("layer_types"):
        raise UserError(
            f"{config.where}: sliding_window_pattern is {pattern!r}, which Gemma 2 does not "
            "have; 2 was expected"
        )
    set_pattern(
        config, task.decoder, layer_types(config, period=2), attentions_by_type(config, attention)
    )
    return task


def _gemma2_config(task: Params) -> dict[str, Any]:
    return {**_common_config(task), **rope_config(task.decoder.layer.self_attention)}


def _gemma3_task(config: PublishedConfig) -> Params:
    task = _common(config)
    attention = task.decoder.layer.self_attention
    attention.qk_norm = True
    attention.query_key_norm = task.decoder.layer.norm.copy()
    bases = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
    ropes = {k: config.get(name, None, float) for k, name in bases.items()}
    attentions = rotated_by_type(config, attention, ropes)
    period = config.get("sliding_window_pattern", 6, least=1)
    # transformers writes it and never reads it.
    written = config.get("_sliding_window_pattern", period)
    if written != period and not config.is_given("layer_types"):
        raise UserError(
            f"{config.where}: _sliding_window_pattern is {written!r}, which has no effect; name it "
            "sliding_window_pattern"
        )
    set_pattern(config, task.decoder, layer_types(config, period), attentions)
    return task


def _gemma3_config(task: Params) -> dict[str, Any]:
    ropes = ropes_config(pattern_of(task.decoder), {SLIDING: _LOCAL_BASE, FULL: _GLOBAL_BASE})
    return {**_common_config(task), **ropes}


def _gemma_task(config: PublishedConfig) -> Params:
    task = _of_all(config)
    # Old files name another function, and transformers takes this one for it.
    config.expect("hidden_act", _GELU, "gelu")
    # No model reads it.
    config.get("hidden_activation", None)
    set_rope(config, task.decoder.layer.self_attention, config.rope())
    return task


def _gemma_config(task: Params) -> dict[str, Any]:
    return {
        **plain_config(task),
        **rope_config(task.decoder.layer.self_attention),
        "hidden_act": _GELU,
        "attention_bias": False,
    }


GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    table=DECODER,
    read_task=_gemma_task,
    config_of=_gemma_config,
    defaults=_GEMMA_DEFAULTS,
)
GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    table=_TABLE,
    read_task=_gemma2_task,
    config_of=_gemma2_config,
    defaults=_DEFAULTS,
)
GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    table=(*_TABLE, *HEAD_NORMS),
    read_task=_gemma3_task,
    config_of=_gemma3_config,
    defaults=_GEMMA3_DEFAULTS,
)
