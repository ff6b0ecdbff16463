"""Cohere's Command R and Command A: sublayers side by side (Cohere 2, arXiv 2504.00698)."""

from __future__ import annotations

from lingvo_gshard.core import Params
from lingvo_gshard.layers import LayerNorm
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import USUAL, decoder
from lingvo_gshard.wings.open_models.families.family import (
    BIASES,
    Part,
    layer_types,
    layered,
    rotated_in_windows,
    setting,
)
from lingvo_gshard.wings.published_layers.heads_norms import HeadsLayerNorm
from lingvo_gshard.wings.published_layers.rotary_pairs import NEIGHBORS

_EPSILON = "layer_norm_eps"


def _read_layer(config: PublishedConfig, task: Params) -> None:
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


def _kinds(config: PublishedConfig) -> list[str]:
    """Returns the type of each layer's attention."""
    return layer_types(config, config.get("sliding_window_pattern", 4, least=1))


_PARTS = (*USUAL, BIASES, setting("logit_scale", "logit_scale", kind=float), Part(_read_layer))
COHERE = decoder(
    "cohere",
    (
        *_PARTS,
        Part(_read_norms, lambda task: {"use_qk_norm": task.decoder.layer.self_attention.qk_norm}),
    ),
    epsilon=_EPSILON,
)
COHERE2 = decoder("cohere2", (*_PARTS, layered(_kinds, rotated_in_windows)), epsilon=_EPSILON)
