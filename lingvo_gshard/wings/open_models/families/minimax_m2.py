"""MiniMax-M2: norms over all heads, and experts chosen by sigmoids with a bias.

https://github.com/MiniMax-AI/MiniMax-M2
"""

from __future__ import annotations

from lingvo_gshard.core import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import NORMS_OF_HEADS, decoder
from lingvo_gshard.wings.open_models.families.experts import experts
from lingvo_gshard.wings.open_models.families.family import JITTER, SILU, Part
from lingvo_gshard.wings.open_models.families.rope import ROPE, set_rope
from lingvo_gshard.wings.published_layers.routers import SigmoidRouter


def _read_rope(config: PublishedConfig, task: Params) -> None:
    attention, rope = task.decoder.layer.self_attention, config.rope()
    rotated = config.get("rotary_dim", None, int, 2)
    # A null of the newer key precedes.
    if rotated and "partial_rotary_factor" not in config.values:
        rope.setdefault("partial_rotary_factor", rotated / attention.head_dim)
    set_rope(config, attention, rope)


FAMILY = decoder(
    "minimax_m2",
    (
        SILU,
        NORMS_OF_HEADS,
        Part(_read_rope, ROPE.values),
        experts(
            "num_local_experts", hidden="intermediate_size", coefficient=0.0, router=SigmoidRouter
        ),
        JITTER,
    ),
)
