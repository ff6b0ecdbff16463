"""MiniMax-M2: norms over all heads, and experts chosen by sigmoids with a bias.

https://github.com/MiniMax-AI/MiniMax-M2
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import (
    DECODER,
    DECODER_DEFAULTS,
    decoder_config,
    plain_task,
    set_heads_norm,
)
from lingvo_gshard.wings.open_models.families.experts import (
    LOCAL_EXPERTS,
    MIXTRAL_EXPERTS,
    selection_bias,
)
from lingvo_gshard.wings.open_models.families.family import JITTER, Family
from lingvo_gshard.wings.open_models.families.rope import set_rope
from lingvo_gshard.wings.published_layers.routers import SigmoidRouter

# Keys of published files that the class does not read.
_UNREAD = (
    "attn_type_list",
    "layernorm_full_attention_beta",
    "layernorm_linear_attention_beta",
    "layernorm_mlp_beta",
    "mlp_intermediate_size",
    "mtp_transformer_layers",
    "num_mtp_modules",
    "shared_moe_mode",
    "use_mtp",
)
_DEFAULTS = DECODER_DEFAULTS | {
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "rope_theta": 5e6,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "vocab_size": 200064,
}
_KEYS = dataclasses.replace(LOCAL_EXPERTS, coefficient=0.0)


def _task(config: PublishedConfig) -> Params:
    config.expect("hidden_act", "silu")
    # Published files state these keys, though the class has no choice.
    for name, value in (
        ("qk_norm_type", "per_layer"),
        ("scoring_func", "sigmoid"),
        ("shared_intermediate_size", 0),
        ("use_qk_norm", True),
        ("use_routing_bias", True),
    ):
        config.expect(name, value)
    for name in _UNREAD:
        config.get(name, None)
    task = plain_task(config)
    set_heads_norm(task)
    attention, rope = task.decoder.layer.self_attention, config.rope()
    rotated = config.get("rotary_dim", None, int, 2)
    if rotated:
        rope.setdefault("partial_rotary_factor", rotated / attention.head_dim)
    set_rope(config, attention, rope)
    _KEYS.read(config, task.decoder, SigmoidRouter.params())
    JITTER.read(config, task)
    return task


def _config(task: Params) -> dict[str, Any]:
    return {**decoder_config(task, JITTER), **_KEYS.config(task.decoder)}


FAMILY = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    table=(
        *DECODER,
        *MIXTRAL_EXPERTS,
        selection_bias("block_sparse_moe.e_score_correction_bias"),
    ),
    read_task=_task,
    config_of=_config,
    defaults=_DEFAULTS,
    aliases={"num_experts": "num_local_experts"},
)
