"""gpt-oss: experts with biases and clamped gates, attention sinks (arXiv 2508.10925)."""

from lingvo_gshard.wings.open_models.families.decoder import (
    DECODER,
    USUAL,
    decoder,
    layer_row,
)
from lingvo_gshard.wings.open_models.families.experts import LOCAL_EXPERTS
from lingvo_gshard.wings.open_models.families.family import (
    BIASES,
    always,
    layer_types,
    layered,
    setting,
    unread,
)

# Gates and factors are published as neighbors in one tensor.
_PAIRS = (("in", 0), ("factor", 1))
_EXPERTS = (
    layer_row("mlp.router.weight", "feed_forward.router.w_gate", "EM->ME"),
    layer_row("mlp.router.bias", "feed_forward.router.b_gate", "E->E"),
    *(
        layer_row(
            f"mlp.experts.gate_up_proj{suffix}",
            f"feed_forward.experts.{kind}_{name}",
            arrangement,
            choose=(("g", index, len(_PAIRS)),),
        )
        for suffix, kind, arrangement in (("", "w", "EM(Hg)->EMH"), ("_bias", "b", "E(Hg)->EH"))
        for name, index in _PAIRS
    ),
    layer_row("mlp.experts.down_proj", "feed_forward.experts.w_out", "EHM->EHM"),
    layer_row("mlp.experts.down_proj_bias", "feed_forward.experts.b_out", "EM->EM"),
)
_SINKS = layer_row("self_attn.sinks", "self_attention.sinks", "N->N")


_BIASED = {
    "decoder.moe.router.use_bias": True,
    "decoder.moe.experts.use_bias": True,
    "decoder.moe.experts.activation": "clamped_swiglu",
}
FAMILY = decoder(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    table=(*DECODER, _SINKS, *_EXPERTS),
    parts=(
        *USUAL,
        BIASES,
        always({"attention.use_sinks": True}),
        layered(lambda config: layer_types(config, period=2)),
        # The first is also in the rotary parameters, the second is num_experts_per_tok.
        unread("initial_context_length", "experts_per_token"),
        LOCAL_EXPERTS,
        always(_BIASED),
        setting("swiglu_alpha", "decoder.moe.experts.gate_alpha", kind=float),
        setting("swiglu_limit", "decoder.moe.experts.gate_limit", kind=float),
    ),
    aliases={"num_experts": "num_local_experts"},
)
