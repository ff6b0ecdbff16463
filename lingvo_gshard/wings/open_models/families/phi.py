"""Phi-3, Phi-4 and Phi-4-mini (arXiv 2404.14219, 2412.08905), and Phi-3.5-MoE."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params
from lingvo_gshard.layers import LayerNorm
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import decoder
from lingvo_gshard.wings.open_models.families.experts import experts
from lingvo_gshard.wings.open_models.families.family import BIASES, SILU, WINDOW, Part, setting
from lingvo_gshard.wings.open_models.families.rope import ROPE, set_rope
from lingvo_gshard.wings.published_layers.routers import SparseMixerRouter

_LENGTH = "original_max_position_embeddings"


def _read_rope(config: PublishedConfig, task: Params) -> None:
    rope = config.rope()
    # Names that LongRoPE had in older files.
    if rope["rope_type"] in ("su", "yarn"):
        rope["rope_type"] = "longrope"
    set_rope(config, task.decoder.layer.self_attention, rope)


def _rope_config(task: Params) -> dict[str, Any]:
    scaling = task.decoder.layer.self_attention.rotary_scaling
    length = {_LENGTH: scaling.original_length} if "original_length" in scaling else {}
    return {**ROPE.values(task), **length}


def _set_layer_norm(config: PublishedConfig, task: Params) -> None:
    del config
    layer = task.decoder.layer
    layer.norm = LayerNorm.params().set(epsilon=layer.norm.epsilon)


_PARTS = (SILU, WINDOW, Part(_read_rope, _rope_config))
PHI3 = decoder("phi3", (*_PARTS, setting("resid_pdrop", "decoder.residual_dropout_rate", null=0.0)))
_THRESHOLD = Part(
    lambda config, task: task.decoder.moe.router.set(
        threshold=2 * config.get("router_jitter_noise", kind=float)
    ),
    lambda task: {"router_jitter_noise": task.decoder.moe.router.threshold / 2},
)
PHIMOE = decoder(
    "phimoe",
    (
        *_PARTS,
        BIASES,
        setting("lm_head_bias", "use_logit_bias", null=False),
        Part(_set_layer_norm),
        experts("num_local_experts", hidden="intermediate_size", router=SparseMixerRouter),
        setting("input_jitter_noise", "decoder.moe.router.jitter", null=0.0),
        _THRESHOLD,
    ),
)
