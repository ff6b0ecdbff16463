"""Families whose layers differ in their windows and rotations.

OLMo 2 and OLMo 3 (arXiv 2501.00656) have norms at the outputs of sublayers, and over all heads.
OLMoE (arXiv 2409.02060) has norms at the inputs, and experts in all layers, and so has FlexOlmo
(arXiv 2507.07024), whose experts have several owners. EXAONE 4.0 (arXiv 2507.11407) has norms at
the outputs, and K-EXAONE (arXiv 2601.01739) at the inputs, and experts. Mellum 2 has Qwen3's
experts (https://huggingface.co/JetBrains/Mellum2-12B-A2.5B-Base). In SmolLM3, every fourth layer
has no rotations (https://huggingface.co/blog/smollm3). Cohere's Command R and Command A have
sublayers side by side (Cohere 2, arXiv 2504.00698).
"""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params
from lingvo_gshard.layers import LayerNorm
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import (
    NORMS_BY_HEAD,
    NORMS_OF_HEADS,
    OUTPUT_POSITION,
    USUAL,
    decoder,
)
from lingvo_gshard.wings.open_models.families.experts import (
    dense_layers,
    experts,
    scaled_experts,
    types_config,
)
from lingvo_gshard.wings.open_models.families.family import (
    BIASES,
    FEED_FORWARD_BIAS,
    FULL,
    IN_PERIODS,
    SILU,
    SLIDING,
    Part,
    attention_of_layers,
    attentions_by_type,
    given_positions,
    layer_types,
    layered,
    pattern_of,
    rotated_in_windows,
    setting,
    sliding_window,
    types_of_layers,
    windows_config,
)
from lingvo_gshard.wings.open_models.families.rope import ROPE, ropes_config, rotated_by_type
from lingvo_gshard.wings.published_layers.heads_norms import HeadsLayerNorm
from lingvo_gshard.wings.published_layers.rotary_pairs import NEIGHBORS

# The base of OLMo 3's rotations. transformers gives `rope_theta` to layers with full attention.
_OLMO_BASE = 5e5


def _olmo_attentions(config: PublishedConfig, attention: Params) -> dict[str, Params]:
    """Returns type -> Params of the self-attention."""
    bases = {FULL: config.get("rope_theta", None, float), SLIDING: _OLMO_BASE}
    return rotated_by_type(config, attention, bases)


def _olmo_config(task: Params) -> dict[str, Any]:
    ropes = ropes_config(pattern_of(task.decoder), {FULL: _OLMO_BASE, SLIDING: _OLMO_BASE})
    return {**ropes, **windows_config(task.decoder)}


_OLMO = (SILU, BIASES, OUTPUT_POSITION, NORMS_OF_HEADS)
OLMO2 = decoder("olmo2", (*_OLMO, ROPE))
_EXPERTS = experts(hidden="intermediate_size", normalize="norm_topk_prob", coefficient=0.01)
OLMOE = decoder("olmoe", (*USUAL, NORMS_OF_HEADS, _EXPERTS))
FLEX_OLMO = decoder("flex_olmo", (*_OLMO, ROPE, _EXPERTS))
OLMO3 = decoder(
    "olmo3",
    (
        *_OLMO,
        layered(lambda config: layer_types(config, period=4), _olmo_attentions, _olmo_config),
    ),
)

_PERIOD = 4


def _exaone_attentions(config: PublishedConfig, attention: Params) -> dict[str, Params]:
    """Returns type -> Params. Layers with full attention do not rotate if others have a window."""
    attentions = attentions_by_type(config, attention)
    if SLIDING in attentions:
        attentions[FULL].rotary_fraction = 0.0
    return attentions


def _exaone_period(config: PublishedConfig) -> int:
    """Returns the layers of a period. Every layer has full attention if there is no window."""
    if config.is_given("layer_types"):
        # Published files also have the pattern, as a text such as LLLG.
        config.get("sliding_window_pattern", None)
        return _PERIOD
    period = config.get("sliding_window_pattern", _PERIOD, least=1)
    return period if sliding_window(config) else 1


_EXAONE = (
    *USUAL,
    NORMS_BY_HEAD,
    layered(lambda config: layer_types(config, _exaone_period(config)), _exaone_attentions),
)
EXAONE4 = decoder("exaone4", (OUTPUT_POSITION, *_EXAONE))
EXAONE_MOE = decoder(
    "exaone_moe",
    (
        *_EXAONE,
        scaled_experts("num_experts", "num_shared_experts", by_type=True),
        IN_PERIODS,
    ),
)

_MELLUM_BASES = {FULL: 5e5, SLIDING: 1e4}


def _read_dense(config: PublishedConfig, task: Params) -> None:
    task.decoder.dense_first = dense_layers(config, 0, by_type=True)


def _mellum_config(task: Params) -> dict[str, Any]:
    ropes = ropes_config(pattern_of(task.decoder), _MELLUM_BASES)
    return {**ropes, **windows_config(task.decoder)}


MELLUM = decoder(
    "mellum",
    (
        SILU,
        BIASES,
        NORMS_BY_HEAD,
        layered(
            lambda config: types_of_layers(config, [FULL] * config.get("num_hidden_layers")),
            lambda config, attention: rotated_by_type(config, attention, _MELLUM_BASES),
            _mellum_config,
        ),
        Part(_read_dense, types_config),
        experts(normalize="norm_topk_prob"),
        IN_PERIODS,
    ),
    read_positions=given_positions,
)

_UNROTATED = ", unrotated"


def _smol_attentions(config: PublishedConfig, attention: Params) -> dict[str, Params]:
    """Returns type -> Params of the self-attention, with and without rotations."""
    attentions = attentions_by_type(config, attention)
    for kind, each in tuple(attentions.items()):
        attentions[kind + _UNROTATED] = each.copy().set(rotary_fraction=0.0)
    return attentions


def _smol_kinds(config: PublishedConfig) -> list[str]:
    """Returns the type of each layer's attention, and whether it has no rotations.

    Raises:
      UserError: a list has the wrong length.
    """
    layers, interval = config.get("num_hidden_layers"), config.get("no_rope_layer_interval")
    usual = [int((index + 1) % interval != 0) for index in range(layers)]
    rotated = types_of_layers(config, usual, "no_rope_layers", may_be_longer=True)
    has_windows = config.get("use_sliding_window", False) and config.is_given("sliding_window")
    kinds = [SLIDING if has_windows and not rotates else FULL for rotates in rotated]
    kinds = types_of_layers(config, kinds)
    return [
        kind if rotates else f"{kind}{_UNROTATED}"
        for kind, rotates in zip(kinds, rotated, strict=True)
    ]


def _smol_config(task: Params) -> dict[str, Any]:
    layers = attention_of_layers(task.decoder)
    rotated = [int(bool(each.rotary_fraction)) for each in layers]
    return {**windows_config(task.decoder), "no_rope_layers": rotated}


SMOLLM3 = decoder(
    "smollm3",
    (
        *USUAL,
        BIASES,
        FEED_FORWARD_BIAS,
        layered(_smol_kinds, _smol_attentions, _smol_config),
    ),
)

_COHERE_EPSILON = "layer_norm_eps"


def _read_cohere(config: PublishedConfig, task: Params) -> None:
    del config
    layer = task.decoder.layer
    layer.norm = LayerNorm.params().set(epsilon=layer.norm.epsilon, use_bias=False)
    layer.norm_position = "shared"
    layer.self_attention.rotary_pairs = NEIGHBORS


def _read_norms(config: PublishedConfig, task: Params) -> None:
    if config.get("use_qk_norm", False):
        layer = task.decoder.layer
        norm = HeadsLayerNorm.params().set(epsilon=layer.norm.epsilon)
        layer.self_attention.set(qk_norm=True, query_key_norm=norm)


def _cohere_kinds(config: PublishedConfig) -> list[str]:
    """Returns the type of each layer's attention."""
    return layer_types(config, config.get("sliding_window_pattern", 4, least=1))


_COHERE = (
    *USUAL,
    BIASES,
    setting("logit_scale", "logit_scale", kind=float),
    Part(_read_cohere),
)
COHERE = decoder(
    "cohere",
    (
        *_COHERE,
        Part(
            _read_norms,
            lambda task: {"use_qk_norm": task.decoder.layer.self_attention.qk_norm},
        ),
    ),
    epsilon=_COHERE_EPSILON,
)
COHERE2 = decoder(
    "cohere2", (*_COHERE, layered(_cohere_kinds, rotated_in_windows)), epsilon=_COHERE_EPSILON
)
