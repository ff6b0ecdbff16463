"""OLMoE: experts in all layers, and norms of queries and keys over all heads (arXiv 2409.02060)."""

from lingvo_gshard.wings.open_models.families.decoder import NORMS_OF_HEADS, USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import experts

FAMILY = decoder(
    "olmoe",
    (
        *USUAL,
        NORMS_OF_HEADS,
        experts(hidden="intermediate_size", normalize="norm_topk_prob", coefficient=0.01),
    ),
)
