"""OLMoE: experts in all layers, and norms of queries and keys over all heads (arXiv 2409.02060)."""

from lingvo_gshard.wings.open_models.families.decoder import (
    DECODER,
    DECODER_DEFAULTS,
    NORMS_OF_HEADS,
    USUAL,
    decoder,
)
from lingvo_gshard.wings.open_models.families.experts import expert_rows, experts
from lingvo_gshard.wings.open_models.families.family import fixed

_DEFAULTS = DECODER_DEFAULTS | {
    "attention_bias": False,
    "clip_qkv": None,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "max_position_embeddings": 4096,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "rms_norm_eps": 1e-5,
    "router_aux_loss_coef": 0.01,
    "vocab_size": 50304,
}
FAMILY = decoder(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    table=(*DECODER, *expert_rows("mlp")),
    parts=(
        *USUAL,
        fixed({"attention_bias": False}, is_written=True),
        fixed({"clip_qkv": None}),
        NORMS_OF_HEADS,
        experts(hidden="intermediate_size", normalize="norm_topk_prob", coefficient=0.01),
    ),
    defaults=_DEFAULTS,
    aliases={"num_local_experts": "num_experts"},
)
