"""Trinity: gated attention whose windows alone rotate, norms on both sides, and experts.

https://huggingface.co/arcee-ai/Trinity-Mini
"""

from __future__ import annotations

from lingvo_gshard.core import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import family
from lingvo_gshard.wings.open_models.families.decoder import NORMS_BY_HEAD, USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import scaled_experts


def _read_scale(config: PublishedConfig, task: Params) -> None:
    # 0 stands for the square root of the model dimension.
    task.embedding_scale = 0.0 if config.get("mup_enabled", False) else 1.0


FAMILY = decoder(
    "afmoe",
    (
        *USUAL,
        NORMS_BY_HEAD,
        family.always({"decoder.layer.norm_position": "both", "attention.has_output_gate": True}),
        family.Part(_read_scale, lambda task: {"mup_enabled": task.embedding_scale == 0.0}),
        family.layered(
            lambda config: family.layer_types(config, config.get("global_attn_every_n_layers", 4)),
            family.rotated_in_windows,
        ),
        scaled_experts(
            "num_experts",
            "num_shared_experts",
            "route_scale",
            normalize="",
            dense="num_dense_layers",
        ),
        family.IN_PERIODS,
    ),
)
