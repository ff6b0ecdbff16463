"""Hunyuan, dense and with experts (arXiv 2411.02265): norms of rotated queries and keys.

Hy3 has norms before the rotation, and DeepSeek-V3's experts.
"""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import NORMS_BY_HEAD, USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import (
    dropless_experts,
    scaled_experts,
    top_k_router,
)
from lingvo_gshard.wings.open_models.families.family import BIASES, SILU, Part, always, extra_layers
from lingvo_gshard.wings.open_models.families.rope import rope_config, set_rope
from lingvo_gshard.wings.published_layers.rotary_scaling import AlphaNTKScaling

# Parameters that files give beside `alpha`, and that nobody reads then.
_BESIDE_ALPHA = ("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim", "type")


def _read_rope(config: PublishedConfig, task: Params) -> None:
    attention = task.decoder.layer.self_attention
    rope = config.rope()
    if rope["rope_type"] == "dynamic" and rope.get("alpha"):
        plain = {k: v for k, v in rope.items() if k not in (*_BESIDE_ALPHA, "alpha")}
        set_rope(config, attention, plain | {"rope_type": "default"})
        attention.rotary_scaling = AlphaNTKScaling.params().set(alpha=float(rope["alpha"]))
    else:
        set_rope(config, attention, rope)


def _rope_config(task: Params) -> dict[str, Any]:
    attention = task.decoder.layer.self_attention
    scaling = attention.rotary_scaling
    if scaling.cls is not AlphaNTKScaling:
        return rope_config(attention)
    base = attention.rotary_base
    rope = {"rope_type": "dynamic", "rope_theta": base, "alpha": scaling.alpha}
    return {"rope_parameters": rope}


def _read_experts(config: PublishedConfig, task: Params) -> None:
    hidden_dim = config.get("intermediate_size")
    count, k = (_of_all_layers(config, name) for name in ("num_experts", "moe_topk"))
    router = top_k_router(k, normalize=True).set(auxiliary_loss_weight=0.0)
    moe = dropless_experts(router, count, hidden_dim)
    moe.shared_hidden_dim = hidden_dim
    task.decoder.set(moe_every=1, moe=moe)


def _of_all_layers(config: PublishedConfig, name: str) -> int:
    """Returns a whole number that a config may have once or for each layer.

    Raises:
      UserError: layers differ, or there is no number above 0.
    """
    value = config.get(name, kind=object)
    values = set(value) if isinstance(value, list) else {value}
    found = values.pop() if len(values) == 1 else None
    if not isinstance(found, int) or found < 1:
        raise UserError(
            f"{config.where}: {name} is {value!r}; one whole number for all layers was expected"
        )
    return found


def _experts_config(task: Params) -> dict[str, Any]:
    moe = task.decoder.moe
    return {
        "intermediate_size": moe.hidden_dim,
        "num_experts": moe.num_experts,
        "moe_topk": moe.router.k,
    }


_PARTS = (
    SILU,
    BIASES,
    NORMS_BY_HEAD,
    always({"attention.normalizes_rotated": True}),
    Part(_read_rope, _rope_config),
)
DENSE = decoder("hunyuan_v1_dense", _PARTS)
EXPERTS = decoder("hunyuan_v1_moe", (*_PARTS, Part(_read_experts, _experts_config)))
HY3 = decoder(
    "hy_v3",
    (
        *USUAL,
        BIASES,
        NORMS_BY_HEAD,
        scaled_experts(
            "num_experts",
            "num_shared_experts",
            "router_scaling_factor",
            normalize="",
            dense=1,
            by_type=True,
        ),
    ),
    read_left_out=extra_layers,
)
