"""Switch Transformers: T5 with one of many experts in every n-th layer (arXiv 2101.03961)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params
from lingvo_gshard.layers import SwitchRouter
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.family import Family
from lingvo_gshard.wings.open_models.families.translation import common
from lingvo_gshard.wings.open_models.families.translation.t5 import t5_config, t5_positions, t5_task

# Each stack, and the key of the config that has the number of its layers.
_SIDES = {"encoder": "num_layers", "decoder": "num_decoder_layers"}


def _task(config: PublishedConfig) -> Params:
    published = config.get("dense_act_fn", kind=str)
    activation = common.activation_of(config, "dense_act_fn", published)
    task = t5_task(config, activation, is_scaled=True, is_tied=True)
    router = SwitchRouter.params().set(
        capacity_factor=0.0,
        jitter=config.get("router_jitter_noise", kind=float),
        use_bias=config.get("router_bias", False),
    )
    for side in _SIDES:
        stack = task.get(side)
        every = _sparse_step(config, side, stack.num_layers)
        # The second layer of each period has experts.
        common.add_experts(config, stack, router, every, max(every - 2, 0))
    return task


def _sparse_step(config: PublishedConfig, side: str, layers: int) -> int:
    """Returns the period of the layers with experts."""
    sparse = config.get(f"num_sparse_{side}_layers", kind=int, least=0)
    return config.get(f"{side}_sparse_step", layers // sparse if sparse else layers)


def _config(task: Params) -> dict[str, Any]:
    moe, values = task.encoder.moe, t5_config(task)
    values |= {
        "dense_act_fn": common.published_activation(task.encoder.layer.feed_forward.activation),
        "is_gated_act": False,
        "tie_word_embeddings": task.tie_softmax,
        "router_jitter_noise": moe.router.jitter,
        **common.experts_config(task.encoder),
    }
    for side, layers in _SIDES.items():
        values[f"num_sparse_{side}_layers"] = values[layers] // task.get(side).moe_every
    return values


FAMILY = Family(
    model_type="switch_transformers",
    read_task=_task,
    config_of=_config,
    input_of=common.translation_input,
    read_positions=t5_positions,
)
