"""ERNIE 4.5, dense and with experts (https://github.com/PaddlePaddle/ERNIE, technical report)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.layers import is_expert_layer
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import experts
from lingvo_gshard.wings.open_models.families.family import IN_PERIODS, Part, always, setting
from lingvo_gshard.wings.published_layers.rotary_pairs import NEIGHBORS
from lingvo_gshard.wings.published_layers.routers import BiasedSoftmaxRouter


def _read_expert_layers(config: PublishedConfig, task: Params) -> None:
    """Sets which layers of a decoder have experts.

    Raises:
      UserError: layers after the last one with experts would have none, or none has any.
    """
    decoder, layers = task.decoder, task.decoder.num_layers
    every = config.get("moe_layer_interval")
    start = config.get("moe_layer_start_index", 0, least=0)
    end = config.get("moe_layer_end_index", -1)
    has_experts = [
        (index + 1) % every == 0 and start <= index <= (layers - 1 if end == -1 else end)
        for index in range(layers)
    ]
    first = next((index for index, has in enumerate(has_experts) if has), 0)
    # Counted from the layer after the dense ones.
    decoder.set(dense_first=max(first - every + 1, 0), moe_every=every)
    if [is_expert_layer(decoder, index) for index in range(layers)] != has_experts:
        raise UserError(
            f"{config.where}: moe_layer_start_index={start}, moe_layer_end_index={end} and "
            f"moe_layer_interval={every} of {layers} layers is not supported; experts in every "
            "layer of the interval up to the last one were expected"
        )


def _expert_layers_config(task: Params) -> dict[str, Any]:
    decoder = task.decoder
    first = next(i for i in range(decoder.num_layers) if is_expert_layer(decoder, i))
    return {"moe_layer_interval": decoder.moe_every, "moe_layer_start_index": first}


def _read_shared(config: PublishedConfig, task: Params) -> None:
    moe = task.decoder.moe
    # Gates are divided by their sum or by this number, whichever is larger.
    if config.get("moe_norm_min", 0.0, float) > 1e-9:
        config.expect("moe_norm_min", 1e-12)
    moe.shared_hidden_dim = moe.hidden_dim * config.get("moe_num_shared_experts", 0)
    if moe.shared_hidden_dim:
        # Routed experts have no biases, and here shared experts are like them.
        config.expect("use_bias", False, beside="moe_num_shared_experts above 0")


def _shared_config(task: Params) -> dict[str, Any]:
    moe = task.decoder.moe
    return {"moe_num_shared_experts": moe.shared_hidden_dim // moe.hidden_dim}


_PARTS = (
    *USUAL,
    setting(
        "use_bias",
        "attention.use_bias",
        "attention.use_output_bias",
        "decoder.layer.feed_forward.use_bias",
        null=False,
    ),
    always({"attention.rotary_pairs": NEIGHBORS}),
)
DENSE = decoder("ernie4_5", _PARTS)
EXPERTS = decoder(
    "ernie4_5_moe",
    (
        *_PARTS,
        setting("use_bias", "use_logit_bias", null=False),
        Part(_read_expert_layers, _expert_layers_config),
        experts("moe_num_experts", "moe_k", coefficient=0.0, router=BiasedSoftmaxRouter),
        Part(_read_shared, _shared_config),
        IN_PERIODS,
    ),
)
