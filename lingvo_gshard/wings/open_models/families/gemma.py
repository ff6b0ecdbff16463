"""Gemma (arXiv 2403.08295), Gemma 2 (2408.00118) and the text models of Gemma 3 (2503.19786)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import decoder
from lingvo_gshard.wings.open_models.families.family import (
    FULL,
    SLIDING,
    Part,
    always,
    layer_types,
    layered,
    pattern_of,
    windows_config,
)
from lingvo_gshard.wings.open_models.families.rope import ROPE, ropes_config, rotated_by_type

_GELU = "gelu_pytorch_tanh"
# The rotary bases of Gemma 3: in layers with a window, and in layers with full attention.
_LOCAL_BASE, _GLOBAL_BASE = 1e4, 1e6


def _read_attention(config: PublishedConfig, task: Params) -> None:
    task.decoder.layer.self_attention.set(
        query_scale=config.get("query_pre_attn_scalar", kind=float, least=1) ** -0.5,
        logit_cap=config.get("attn_logit_softcapping", 0.0),
    )
    task.logit_cap = config.get("final_logit_softcapping", 0.0)


def _attention_config(task: Params) -> dict[str, Any]:
    attention = pattern_of(task.decoder)[0]
    scale = attention.query_scale or (attention.head_dim or task.model_dim) ** -0.5
    return {
        "query_pre_attn_scalar": round(scale**-2, 6),
        "attn_logit_softcapping": attention.logit_cap or None,
        "final_logit_softcapping": task.logit_cap or None,
    }


def _gemma3_kinds(config: PublishedConfig) -> list[str]:
    """Returns the type of each layer's attention."""
    return layer_types(config, config.get("sliding_window_pattern", 6, least=1))


def _gemma3_attentions(config: PublishedConfig, attention: Params) -> dict[str, Params]:
    """Returns type -> Params of the self-attention."""
    bases = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
    ropes = {kind: config.get(name, None, float) for kind, name in bases.items()}
    return rotated_by_type(config, attention, ropes)


def _gemma3_layers_config(task: Params) -> dict[str, Any]:
    ropes = ropes_config(pattern_of(task.decoder), {SLIDING: _LOCAL_BASE, FULL: _GLOBAL_BASE})
    return {**ropes, **windows_config(task.decoder)}


def _set_norms(config: PublishedConfig, task: Params) -> None:
    del config
    norm = task.decoder.layer.norm.copy()
    task.decoder.layer.self_attention.set(qk_norm=True, query_key_norm=norm)


# Parts of all generations, without rotations.
_COMMON = (
    always(
        {
            "decoder.layer.norm.zero_centered": True,
            "decoder.layer.feed_forward.activation": "geglu_tanh",
            # 0 stands for the square root of the model dimension.
            "embedding_scale": 0.0,
        }
    ),
)
_ATTENTION = Part(_read_attention, _attention_config)
# Parts of Gemma 2 and 3.
_LATER = (
    *_COMMON,
    always({"decoder.layer.norm_position": "both"}),
    _ATTENTION,
)
GEMMA = decoder(
    "gemma",
    (
        *_COMMON,
        # Old files name another function, and transformers takes this one for it.
        Part(
            lambda config, task: config.expect("hidden_act", _GELU, "gelu"),
            lambda task: {"hidden_act": _GELU},
        ),
        ROPE,
    ),
)
_ALTERNATING = (ROPE, layered(lambda config: layer_types(config, period=2)))
GEMMA2 = decoder("gemma2", (*_LATER, *_ALTERNATING))
# VaultGemma (arXiv 2510.15001) has no norms of outputs.
VAULT_GEMMA = decoder("vaultgemma", (*_COMMON, _ATTENTION, *_ALTERNATING))
GEMMA3 = decoder(
    "gemma3_text",
    (
        *_LATER,
        Part(_set_norms),
        layered(_gemma3_kinds, _gemma3_attentions, _gemma3_layers_config),
    ),
)
