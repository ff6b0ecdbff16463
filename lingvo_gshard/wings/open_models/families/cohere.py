"""Cohere's Command R and Command A: sublayers side by side (Cohere 2, arXiv 2504.00698)."""

from __future__ import annotations

import dataclasses
from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.norm import LayerNorm
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import (
    DECODER,
    HEAD_NORMS,
    HEADS_NORMS,
    plain_config,
    plain_task,
)
from lingvo_gshard.wings.open_models.families.family import (
    BIASES,
    FULL,
    Family,
    Setting,
    attentions_by_type,
    layer_types,
    rotating,
    set_pattern,
    windows_config,
)
from lingvo_gshard.wings.open_models.families.rope import rope_config, set_rope
from lingvo_gshard.wings.published_layers.heads_norms import HeadsLayerNorm
from lingvo_gshard.wings.published_layers.rotary_pairs import NEIGHBORS

_EPSILON = "layer_norm_eps"
# Command R+ has a norm for each head, in place of one over all heads together.
_TABLE = (
    *(row for row in DECODER if row not in HEADS_NORMS),
    *(dataclasses.replace(row, arrangement="ND->ND") for row in HEAD_NORMS),
)
_SETTINGS = (BIASES, Setting("logit_scale", ("logit_scale",), kind=float))
_DEFAULTS = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    _EPSILON: 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 40,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_qk_norm": False,
    "vocab_size": 256000,
}
_COHERE2_DEFAULTS = {key: value for key, value in _DEFAULTS.items() if key != "use_qk_norm"} | {
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}
# Published files state these keys, though the class has no choice.
_FIXED = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
}


def _task(config: PublishedConfig) -> Params:
    config.expect("hidden_act", "silu")
    task = plain_task(config, *_SETTINGS, epsilon=_EPSILON)
    layer = task.decoder.layer
    layer.norm = LayerNorm.params().set(epsilon=layer.norm.epsilon, use_bias=False)
    layer.norm_position = "shared"
    layer.self_attention.rotary_pairs = NEIGHBORS
    set_rope(config, layer.self_attention, config.rope())
    return task


def _cohere_task(config: PublishedConfig) -> Params:
    task = _task(config)
    if config.get("use_qk_norm", False):
        attention = task.decoder.layer.self_attention
        norm = HeadsLayerNorm.params().set(epsilon=task.decoder.layer.norm.epsilon)
        attention.set(qk_norm=True, query_key_norm=norm)
    return task


def _cohere_config(task: Params) -> dict[str, Any]:
    return {**_config(task), "use_qk_norm": task.decoder.layer.self_attention.qk_norm}


def _config(task: Params) -> dict[str, Any]:
    return {
        **plain_config(task, *_SETTINGS, epsilon=_EPSILON),
        **rope_config(rotating(task.decoder)),
        "hidden_act": "silu",
    }


def _cohere2_task(config: PublishedConfig) -> Params:
    for name, value in _FIXED.items():
        config.expect(name, value)
    for name in ("cache_implementation", "layer_switch", "use_parallel_embedding"):
        config.get(name, None)
    task = _task(config)
    # Layers with full attention do not rotate.
    attentions = attentions_by_type(config, task.decoder.layer.self_attention)
    attentions[FULL].rotary_fraction = 0.0
    period = config.get("sliding_window_pattern", 4, least=1)
    set_pattern(config, task.decoder, layer_types(config, period), attentions)
    return task


def _cohere2_config(task: Params) -> dict[str, Any]:
    return {**_config(task), **windows_config(task.decoder)}


COHERE = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    table=_TABLE,
    read_task=_cohere_task,
    config_of=_cohere_config,
    defaults=_DEFAULTS,
)
COHERE2 = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    table=DECODER,
    read_task=_cohere2_task,
    config_of=_cohere2_config,
    defaults=_COHERE2_DEFAULTS,
)
