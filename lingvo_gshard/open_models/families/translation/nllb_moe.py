"""NLLB-MoE: M2M-100 with two of many experts in every n-th layer (arXiv 2207.04672, section 6)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.moe.dispatches import DroplessDispatch
from lingvo_gshard.layers.moe.routers import TopKRouter
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.families.experts import loss_coefficient, loss_weight
from lingvo_gshard.open_models.families.translation.common import set_experts
from lingvo_gshard.open_models.families.translation.fairseq import (
    fairseq_family,
    fairseq_rows,
)
from lingvo_gshard.open_models.families.translation.m2m_100 import (
    M2M_100_DEFAULTS,
    TABLES,
    m2m_100_config,
    m2m_100_task,
)
from lingvo_gshard.open_models.table import Table, TensorPattern

_SIDES = ("encoder", "decoder")
_EXPERTS_PER_TOKEN = 2
# These keys decide which tokens are dropped if experts have a capacity. Ours have no capacity.
_CAPACITY = (
    "expert_capacity",
    "batch_prioritized_routing",
    "normalize_router_prob_before_dropping",
    "moe_eval_capacity_token_fraction",
    "router_ignore_padding_tokens",
)

_DEFAULTS = M2M_100_DEFAULTS | {
    "batch_prioritized_routing": False,
    "decoder_sparse_step": 4,
    "encoder_sparse_step": 4,
    "expert_capacity": 64,
    "moe_eval_capacity_token_fraction": 1.0,
    "moe_token_dropout": 0.2,
    "normalize_router_prob_before_dropping": False,
    "num_experts": 128,
    "router_aux_loss_coef": 0.001,
    "router_bias": False,
    "router_dtype": "float32",
    "router_ignore_padding_tokens": False,
    "router_z_loss_coef": 0.001,
    "second_expert_policy": "all",
}


def _expert_rows() -> Table:
    rows = []
    for stack in _SIDES:
        published, ours = f"model.{stack}.layers.{{layer}}.ffn", f"{stack}.{{layer}}.feed_forward"
        expert = f"{published}.experts.expert_{{expert}}"
        rows += [
            TensorPattern(
                f"{published}.router.classifier.weight", f"{ours}.router.w_gate", "EM->ME"
            ),
            TensorPattern(f"{published}.router.classifier.bias", f"{ours}.router.b_gate", "E->E"),
            TensorPattern(f"{expert}.fc1.weight", f"{ours}.experts.w_in", "HM->MH"),
            TensorPattern(f"{expert}.fc1.bias", f"{ours}.experts.b_in", "H->H"),
            TensorPattern(f"{expert}.fc2.weight", f"{ours}.experts.w_out", "MH->HM"),
            TensorPattern(f"{expert}.fc2.bias", f"{ours}.experts.b_out", "M->M"),
        ]
    return tuple(rows)


def _task(config: PublishedConfig) -> Params:
    config.expect("router_dtype", "float32")
    config.expect("router_type", "tokens_masked")
    config.expect("second_expert_policy", "all")
    for name in _CAPACITY:
        config.get(name, None)
    task = m2m_100_task(config)
    router = TopKRouter.params().set(
        k=_EXPERTS_PER_TOKEN,
        normalize=True,
        # Training drops outputs of experts, and inference scales them instead (section 6.2).
        scale=1.0 - config.get("moe_token_dropout", kind=float),
        use_bias=config.get("router_bias", False),
    )
    for side in _SIDES:
        stack = task.get(side)
        stack.moe = MixtureOfExperts.params().set(
            num_experts=config.get("num_experts"),
            router=router.copy(),
            dispatch=DroplessDispatch.params(),
        )
        activation = stack.layer.feed_forward.activation
        stack.moe.experts.set(activation=activation, use_bias=True)
        set_experts(stack, config.get(f"{side}_sparse_step", kind=int, least=0))
        stack.moe.router.set(
            auxiliary_loss_weight=loss_weight(
                config.get("router_aux_loss_coef", 0.001), stack, _EXPERTS_PER_TOKEN
            ),
            z_loss_weight=loss_weight(config.get("router_z_loss_coef", 0.001), stack),
        )
    return task


def _config(task: Params) -> dict[str, Any]:
    moe = task.encoder.moe
    # The gates of other routers sum to 1.
    scale = moe.router.scale if "scale" in moe.router else 1.0
    return {
        **m2m_100_config(task),
        "num_experts": moe.num_experts,
        "router_bias": moe.router.use_bias,
        "router_dtype": "float32",
        "second_expert_policy": "all",
        "moe_token_dropout": round(1.0 - scale, 9),
        "router_aux_loss_coef": loss_coefficient(
            moe.router.auxiliary_loss_weight, task.encoder, _EXPERTS_PER_TOKEN
        ),
        "router_z_loss_coef": loss_coefficient(moe.router.z_loss_weight, task.encoder),
        "encoder_sparse_step": task.encoder.moe_every,
        "decoder_sparse_step": task.decoder.moe_every,
    }


FAMILY = fairseq_family(
    model_type="nllb-moe",
    architecture="NllbMoeForConditionalGeneration",
    table=(*TABLES, *fairseq_rows("cross_attention", "ffn.", "ff_layer_norm"), *_expert_rows()),
    read_task=_task,
    config_of=_config,
    defaults=_DEFAULTS,
)
