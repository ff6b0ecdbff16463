"""Mistral: dense decoders with a sliding window (arXiv 2310.06825, section 2)."""

from lingvo_gshard.wings.open_models.families.decoder import (
    DECODER,
    DECODER_DEFAULTS,
    USUAL,
    decoder,
)
from lingvo_gshard.wings.open_models.families.experts import LOCAL_EXPERTS, MIXTRAL_EXPERTS
from lingvo_gshard.wings.open_models.families.family import JITTER, WINDOW

_DEFAULTS = DECODER_DEFAULTS | {
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
_EXPERTS_DEFAULTS = _DEFAULTS | {
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "sliding_window": None,
}


DENSE = decoder(
    model_type="mistral",
    architecture="MistralForCausalLM",
    parts=(*USUAL, WINDOW),
    defaults=_DEFAULTS,
)
EXPERTS = decoder(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    table=(*DECODER, *MIXTRAL_EXPERTS),
    parts=(*USUAL, WINDOW, LOCAL_EXPERTS, JITTER),
    defaults=_EXPERTS_DEFAULTS,
    aliases={"num_experts": "num_local_experts"},
)
