"""Qwen3-Next and the language models of Qwen3.5: gated delta nets between gated attentions.

https://qwen.ai/blog?id=4074cca80393150c248e508aa62983f9cb7d27cd
"""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import GATED_SHARED, experts
from lingvo_gshard.wings.open_models.families.family import (
    BIASES,
    FULL,
    IN_PERIODS,
    LINEAR,
    Part,
    attention_of_layers,
    layered,
    types_of_layers,
)
from lingvo_gshard.wings.published_layers.gated_delta_net import GatedDeltaNet


def _read_norms(config: PublishedConfig, task: Params) -> None:
    del config
    norm = task.decoder.layer.norm.set(zero_centered=True)
    task.decoder.layer.self_attention.set(
        qk_norm=True, has_output_gate=True, query_key_norm=norm.copy()
    )


def _kinds(config: PublishedConfig) -> list[str]:
    """Returns the type of each layer."""
    interval = config.get("full_attention_interval", 4, least=1)
    layers = config.get("num_hidden_layers")
    return types_of_layers(config, [LINEAR if (i + 1) % interval else FULL for i in range(layers)])


def _delta_net(config: PublishedConfig) -> Params:
    """Returns the Params of the gated delta net.

    Raises:
      UserError: key heads have no equal numbers of values.
    """
    heads, values = config.get("linear_num_key_heads"), config.get("linear_num_value_heads")
    if values % heads:
        raise UserError(
            f"{config.where}: linear_num_value_heads is {values}; a multiple of "
            f"linear_num_key_heads={heads} was expected"
        )
    net = GatedDeltaNet.params().set(
        num_heads=heads,
        values_per_head=values // heads,
        head_dim=config.get("linear_key_head_dim"),
        value_dim=config.get("linear_value_head_dim"),
        convolution_width=config.get("linear_conv_kernel_dim"),
    )
    net.output_norm.epsilon = config.get("rms_norm_eps", kind=float)
    return net


def _read_sizes(config: PublishedConfig, task: Params) -> None:
    del task
    key, value = (config.get(f"linear_{name}_head_dim") for name in ("key", "value"))
    config.expect("linear_value_head_dim", key)
    config.expect("linear_key_head_dim", value)


def _layers_config(task: Params) -> dict[str, Any]:
    layers = attention_of_layers(task.decoder)
    nets = [each for each in layers if each.cls is GatedDeltaNet]
    net = nets[0] if nets else GatedDeltaNet.params().set(num_heads=1, head_dim=1)
    return {
        "layer_types": [LINEAR if each.cls is GatedDeltaNet else FULL for each in layers],
        "linear_conv_kernel_dim": net.convolution_width,
        "linear_key_head_dim": net.head_dim,
        "linear_num_key_heads": net.num_heads,
        "linear_num_value_heads": net.num_heads * net.values_per_head,
        "linear_value_head_dim": net.value_dim or net.head_dim,
    }


_PARTS = (
    *USUAL,
    BIASES,
    Part(_read_norms),
    layered(
        _kinds,
        lambda config, attention: {FULL: attention.copy(), LINEAR: _delta_net(config)},
        _layers_config,
    ),
)


NEXT = decoder(
    "qwen3_next",
    (Part(_read_sizes), *_PARTS, experts(normalize="norm_topk_prob"), GATED_SHARED, IN_PERIODS),
)
DENSE = decoder("qwen3_5_text", _PARTS)
EXPERTS = decoder(
    "qwen3_5_moe_text",
    (*_PARTS, experts(), GATED_SHARED, IN_PERIODS),
    hidden="moe_intermediate_size",
)
