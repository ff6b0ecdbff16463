"""Seed-OSS: a dense decoder with biases (https://github.com/ByteDance-Seed/seed-oss)."""

from lingvo_gshard.wings.open_models.families.decoder import USUAL, decoder
from lingvo_gshard.wings.open_models.families.family import FEED_FORWARD_BIAS, setting

FAMILY = decoder(
    "seed_oss",
    (
        *USUAL,
        setting("attention_bias", "attention.use_bias", null=False),
        setting("attention_out_bias", "attention.use_output_bias", null=False),
        FEED_FORWARD_BIAS,
        setting("residual_dropout", "decoder.residual_dropout_rate", null=0.0),
    ),
)
