"""Seed-OSS: a dense decoder with biases (https://github.com/ByteDance-Seed/seed-oss)."""

from lingvo_gshard.wings.open_models.families.decoder import DECODER_DEFAULTS, USUAL, decoder
from lingvo_gshard.wings.open_models.families.family import FEED_FORWARD_BIAS, setting

_DEFAULTS = DECODER_DEFAULTS | {
    "attention_bias": True,
    "attention_dropout": 0.1,
    "attention_out_bias": False,
    "head_dim": 128,
    "intermediate_size": 27648,
    "max_position_embeddings": 524288,
    "mlp_bias": False,
    "num_attention_heads": 80,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "residual_dropout": 0.1,
    "vocab_size": 155136,
}
FAMILY = decoder(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    parts=(
        *USUAL,
        setting("attention_bias", "attention.use_bias", null=False),
        setting("attention_out_bias", "attention.use_output_bias", null=False),
        FEED_FORWARD_BIAS,
        setting("residual_dropout", "decoder.residual_dropout_rate", null=0.0),
    ),
    defaults=_DEFAULTS,
)
