"""Trinity: gated attention whose windows alone rotate, norms on both sides, and experts.

https://huggingface.co/arcee-ai/Trinity-Mini
"""

from __future__ import annotations

from lingvo_gshard.core import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import NORMS_BY_HEAD, USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import scaled_experts
from lingvo_gshard.wings.open_models.families.family import (
    IN_PERIODS,
    Part,
    always,
    layer_types,
    layered,
    rotated_in_windows,
)


def _read_scale(config: PublishedConfig, task: Params) -> None:
    # 0 stands for the square root of the model dimension.
    task.embedding_scale = 0.0 if config.get("mup_enabled", False) else 1.0


FAMILY = decoder(
    "afmoe",
    (
        *USUAL,
        NORMS_BY_HEAD,
        always({"decoder.layer.norm_position": "both", "attention.has_output_gate": True}),
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
