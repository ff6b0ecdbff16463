"""Nemotron-H and Nemotron 3: arXiv 2504.03624, arXiv 2512.20848, arXiv 2512.20856."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params
from lingvo_gshard.layers import FeedForward, MixtureOfExperts
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import decoder
from lingvo_gshard.wings.open_models.families.experts import scaled_config, scaled_experts
from lingvo_gshard.wings.open_models.families.family import (
    BIASES,
    FULL,
    LINEAR,
    Part,
    given_positions,
    set_pattern,
    stack_of,
)
from lingvo_gshard.wings.open_models.families.hybrids.mamba import (
    first_mamba,
    mamba_config,
    read_mamba,
)
from lingvo_gshard.wings.published_layers.latent_experts import LatentExperts
from lingvo_gshard.wings.published_layers.mamba import Mamba2
from lingvo_gshard.wings.published_layers.single_sublayers import (
    NoAttention,
    NoFeedForward,
    SingleSublayerStack,
)

# Hyperparameter -> key of Nemotron-H.
_KEYS = {
    "num_groups": "n_groups",
    "num_heads": "mamba_num_heads",
    "head_dim": "ssm_state_size",
    "value_dim": "mamba_head_dim",
    "convolution_width": "conv_kernel",
    "use_convolution_bias": "use_conv_bias",
}
_MLP, _MOE = "mlp", "moe"
# Type of a layer, and its letter and earlier name.
_KINDS = {"M": LINEAR, "mamba": LINEAR, "*": FULL, "attention": FULL, "-": _MLP, "E": _MOE}
# The usual pattern of a config without one.
_USUAL = [LINEAR, _MOE, FULL, _MLP]
# Keys of other families with such experts.
_NOT_READ = ("first_k_dense_replace", "n_shared_experts")
_EXPERTS, _MIXTURES = scaled_experts(dense=0), (MixtureOfExperts, LatentExperts)


def _kinds(config: PublishedConfig) -> list[str]:
    """Returns the type of each layer; no key says how many layers there are."""
    kinds = config.get("layers_block_type", None, list)
    if kinds is None:
        kinds = list(config.get("hybrid_override_pattern", "", str)) or _USUAL
    return [_KINDS.get(kind, kind) for kind in kinds]


def _read_layers(config: PublishedConfig, task: Params) -> None:
    config.expect("use_bias", False)
    given_positions(config)
    config.expect("mamba_hidden_act", "silu", "swish")
    config.expect("mlp_hidden_act", "relu2")
    stack = stack_of(SingleSublayerStack, task.decoder)
    mlp = stack.layer.feed_forward.set(activation="squared_relu")
    mlp.use_bias = config.get("mlp_bias", False)
    none, kinds = NoAttention.params(), _kinds(config)
    attentions = {
        FULL: stack.layer.self_attention,
        LINEAR: read_mamba(config, _KEYS, "layer_norm_epsilon").set(
            least_step=config.get("time_step_min", 0.0, float)
        ),
        _MLP: none,
        _MOE: none,
    }
    others: dict[str, Params] = dict.fromkeys((FULL, LINEAR), NoFeedForward.params())
    others[_MLP] = mlp
    if _MOE in kinds:
        others[_MOE] = _experts(config, task)
    set_pattern(config, stack, kinds, attentions)
    period = len(stack.attention_pattern)
    if not period:
        stack.attention_pattern, period = (stack.layer.self_attention,), 1
    stack.feed_forward_pattern = tuple(others[kind].copy() for kind in kinds[:period])
    task.decoder = stack


def _experts(config: PublishedConfig, task: Params) -> Params:
    config.expect("mlp_bias", False, beside="experts")
    read = task.copy()
    _EXPERTS.read(config, read)
    moe = read.decoder.moe.set(shared_hidden_dim=config.get("moe_shared_expert_intermediate_size"))
    moe.experts.activation = "squared_relu"
    if latent := config.get("moe_latent_size", 0, least=1):
        moe = LatentExperts.params().set(**dict(moe.items()), latent_dim=latent)
    return moe


def _layers_config(task: Params) -> dict[str, Any]:
    stack = task.decoder
    attentions, others = stack.attention_pattern, stack.feed_forward_pattern
    kinds: dict[Any, str] = {Mamba2: LINEAR, FeedForward: _MLP, **dict.fromkeys(_MIXTURES, _MOE)}
    pattern = []
    for attention, other in zip(attentions, others, strict=True):
        only = attention if other.cls is NoFeedForward else other
        pattern.append(kinds.get(only.cls, FULL))
    found: dict[str, Any] = {
        "layers_block_type": [pattern[i % len(pattern)] for i in range(stack.num_layers)],
        "mlp_bias": stack.layer.feed_forward.use_bias,
        "mlp_hidden_act": "relu2",
    }
    if moe := next((each for each in others if each.cls in _MIXTURES), None):
        described = task.copy()
        described.decoder.moe = moe
        experts = scaled_config(described)
        found |= {key: value for key, value in experts.items() if key not in _NOT_READ}
        found["moe_shared_expert_intermediate_size"] = moe.shared_hidden_dim
        found["moe_latent_size"] = moe.get("latent_dim") if "latent_dim" in moe else None
    if mamba := first_mamba(stack):
        found |= mamba_config(mamba, _KEYS) | {"time_step_min": mamba.least_step}
    return found


NEMOTRON_H = decoder(
    "nemotron_h",
    (BIASES, Part(_read_layers, _layers_config)),
    epsilon="layer_norm_epsilon",
    layers=lambda config: len(_kinds(config)),
    read_positions=given_positions,
)
