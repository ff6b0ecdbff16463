"""MiMo-V2-Flash: windows with sinks and twice the key heads, values of their own size, experts.

https://github.com/XiaomiMiMo/MiMo-V2-Flash
"""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import family
from lingvo_gshard.wings.open_models.families.decoder import decoder
from lingvo_gshard.wings.open_models.families.experts import scaled_experts
from lingvo_gshard.wings.open_models.families.rope import ropes_by_type, ropes_config, set_rope

_BASES = {family.FULL: 5e6, family.SLIDING: 10000.0}
_FRACTION = 0.334


def _kinds(config: PublishedConfig) -> list[str]:
    """Returns the type of each layer's attention."""
    layers = config.get("num_hidden_layers")
    usual = [family.SLIDING if i and (i + 1) % 6 else family.FULL for i in range(layers)]
    return family.types_of_layers(config, usual)


def _attentions(config: PublishedConfig, attention: Params) -> dict[str, Params]:
    """Returns type -> Params of the self-attention."""
    window = family.sliding_window(config)
    # This key of published files, which comes first, does not count the position itself.
    size = config.get("sliding_window_size", None, int) or window
    near = attention.copy().set(
        window=size, use_sinks=True, num_key_value_heads=2 * attention.num_key_value_heads
    )
    attentions = {family.FULL: attention.copy(), family.SLIDING: near}
    for kind, rope in ropes_by_type(config, _BASES).items():
        set_rope(config, attentions[kind], {"partial_rotary_factor": _FRACTION, **rope})
    return attentions


def _layers_config(task: Params) -> dict[str, Any]:
    pattern = family.pattern_of(task.decoder)
    windows = [each for each in pattern if each.window]
    heads = {each.num_key_value_heads // (2 if each.window else 1) for each in pattern}
    return {
        **ropes_config(pattern, _BASES),
        "layer_types": family.windows_config(task.decoder)["layer_types"],
        "num_key_value_heads": heads.pop(),
        "sliding_window": windows[0].window + 1 if windows else 129,
    }


FAMILY = decoder(
    "mimo_v2_flash",
    (
        family.SILU,
        family.setting("attention_bias", "attention.use_bias", null=False),
        family.setting("attention_value_scale", "attention.value_scale", null=1.0),
        family.setting("v_head_dim", "attention.value_dim"),
        family.layered(_kinds, _attentions, _layers_config),
        scaled_experts(dense=1, by_type=True),
        family.IN_PERIODS,
    ),
    read_positions=family.given_positions,
)
