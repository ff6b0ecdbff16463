"""GLM-4.5: experts chosen by sigmoids with a bias, and a shared one (arXiv 2508.06471)."""

from lingvo_gshard.wings.open_models.families.decoder import (
    DECODER,
    DECODER_DEFAULTS,
    NORMS_BY_HEAD,
    USUAL,
    decoder,
)
from lingvo_gshard.wings.open_models.families.experts import (
    EXPERT_ALIASES,
    SHARED_EXPERT,
    SIGMOID_EXPERTS,
    expert_rows,
)
from lingvo_gshard.wings.open_models.families.family import extra_layers, setting

_DEFAULTS = DECODER_DEFAULTS | {
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
FAMILY = decoder(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    table=(*DECODER, *expert_rows("mlp"), *SHARED_EXPERT),
    parts=(
        *USUAL,
        setting("attention_bias", "attention.use_bias", null=False),
        NORMS_BY_HEAD,
        setting("use_qk_norm", "attention.qk_norm", null=False),
        SIGMOID_EXPERTS,
    ),
    defaults=_DEFAULTS,
    aliases=EXPERT_ALIASES,
    read_left_out=extra_layers,
)
