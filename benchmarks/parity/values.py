"""Values of small configs that several cases have in common."""

from __future__ import annotations

from typing import Any

LONG = {"max_position_embeddings": 128}
# Padding of these classes has an id beyond the small vocabulary, or of a token in the texts, which
# would have no gradient.
PADDED = {"pad_token_id": 0}
WINDOWS = {"sliding_window": 6, "num_hidden_layers": 4}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
}
INDEXED = {"index_topk": 48, "index_head_dim": 8, "index_n_heads": 2}


def rope(kind: str, **parameters: float) -> dict[str, Any]:
    """Returns the rotary parameters of a scaling."""
    return {**LONG, "rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}
