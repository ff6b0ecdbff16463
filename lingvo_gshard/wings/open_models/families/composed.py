"""Families that common parts describe, or common parts and a reader of one key.

Llama 3: arXiv 2407.21783, section 3.2. Seed-OSS: https://github.com/ByteDance-Seed/seed-oss.
GLM-4, GLM-4-0414 and GLM-4.5: arXiv 2406.12793, 2508.06471. Solar Open: arXiv 2601.07022.
gpt-oss: arXiv 2508.10925. dots.llm1: arXiv 2506.05767. Trinity:
https://huggingface.co/arcee-ai/Trinity-Mini. MiniMax-M2: https://github.com/MiniMax-AI/MiniMax-M2
"""

from __future__ import annotations

from lingvo_gshard.core import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import (
    NORMS_BY_HEAD,
    NORMS_OF_HEADS,
    USUAL,
    decoder,
)
from lingvo_gshard.wings.open_models.families.experts import (
    LOCAL_EXPERTS,
    experts,
    scaled_experts,
)
from lingvo_gshard.wings.open_models.families.family import (
    BIASES,
    FEED_FORWARD_BIAS,
    IN_PERIODS,
    INPUT_BIASES,
    JITTER,
    SILU,
    Part,
    always,
    extra_layers,
    later_windows,
    layer_types,
    layered,
    rotated_in_windows,
    setting,
)
from lingvo_gshard.wings.open_models.families.rope import ROPE, set_rope
from lingvo_gshard.wings.published_layers.rotary_pairs import NEIGHBORS
from lingvo_gshard.wings.published_layers.routers import SigmoidRouter

_NEIGHBORS = always({"attention.rotary_pairs": NEIGHBORS})
_ON_BOTH_SIDES = always({"decoder.layer.norm_position": "both"})
_LLAMA = (*USUAL, BIASES, FEED_FORWARD_BIAS)
LLAMA = decoder("llama", _LLAMA)
HELIUM = decoder("helium", (*USUAL, INPUT_BIASES, FEED_FORWARD_BIAS, _NEIGHBORS))
INTERNLM3 = decoder("internlm3", _LLAMA)
IQUEST_CODER = decoder("iquestcoder", _LLAMA)
SEED_OSS = decoder(
    "seed_oss",
    (
        *USUAL,
        setting("attention_bias", "attention.use_bias", null=False),
        setting("attention_out_bias", "attention.use_output_bias", null=False),
        FEED_FORWARD_BIAS,
        setting("residual_dropout", "decoder.residual_dropout_rate", null=0.0),
    ),
)

# Half of a head rotates.
GLM = decoder("glm", (*USUAL, INPUT_BIASES, _NEIGHBORS))
GLM4 = decoder("glm4", (*USUAL, INPUT_BIASES, _NEIGHBORS, _ON_BOTH_SIDES))
GLM4_MOE = decoder(
    "glm4_moe",
    (
        *USUAL,
        INPUT_BIASES,
        NORMS_BY_HEAD,
        setting("use_qk_norm", "attention.qk_norm", null=False),
        scaled_experts(),
    ),
    read_left_out=extra_layers,
)
SOLAR_OPEN = decoder(
    "solar_open",
    (*USUAL, INPUT_BIASES, scaled_experts(dense=0)),
    hidden="moe_intermediate_size",
)
DOTS1 = decoder(
    "dots1",
    (*USUAL, BIASES, NORMS_BY_HEAD, layered(later_windows), scaled_experts(), IN_PERIODS),
)

_BIASED = {
    "decoder.moe.router.use_bias": True,
    "decoder.moe.experts.use_bias": True,
    "decoder.moe.experts.activation": "clamped_swiglu",
}
GPT_OSS = decoder(
    "gpt_oss",
    (
        *USUAL,
        BIASES,
        always({"attention.use_sinks": True}),
        layered(lambda config: layer_types(config, period=2)),
        LOCAL_EXPERTS,
        always(_BIASED),
        setting("swiglu_alpha", "decoder.moe.experts.gate_alpha", kind=float),
        setting("swiglu_limit", "decoder.moe.experts.gate_limit", kind=float),
    ),
)


def _read_scale(config: PublishedConfig, task: Params) -> None:
    # 0 stands for the square root of the model dimension.
    task.embedding_scale = 0.0 if config.get("mup_enabled", False) else 1.0


AFMOE = decoder(
    "afmoe",
    (
        *USUAL,
        NORMS_BY_HEAD,
        _ON_BOTH_SIDES,
        always({"attention.has_output_gate": True}),
        Part(_read_scale, lambda task: {"mup_enabled": task.embedding_scale == 0.0}),
        layered(
            lambda config: layer_types(config, config.get("global_attn_every_n_layers", 4)),
            rotated_in_windows,
        ),
        scaled_experts(
            "num_experts",
            "num_shared_experts",
            "route_scale",
            normalize="",
            dense="num_dense_layers",
        ),
        IN_PERIODS,
    ),
)


def _read_rope(config: PublishedConfig, task: Params) -> None:
    attention, rope = task.decoder.layer.self_attention, config.rope()
    rotated = config.get("rotary_dim", None, int, 2)
    # A null of the newer key precedes.
    if rotated and "partial_rotary_factor" not in config.values:
        rope.setdefault("partial_rotary_factor", rotated / attention.head_dim)
    set_rope(config, attention, rope)


MINIMAX_M2 = decoder(
    "minimax_m2",
    (
        SILU,
        NORMS_OF_HEADS,
        Part(_read_rope, ROPE.values),
        experts(
            "num_local_experts",
            hidden="intermediate_size",
            coefficient=0.0,
            router=SigmoidRouter,
        ),
        JITTER,
    ),
)
