"""Qwen3-Next and the language models of Qwen3.5: gated delta nets between gated attentions.

https://qwen.ai/blog?id=4074cca80393150c248e508aa62983f9cb7d27cd
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import (
    ATTENTION,
    ATTENTION_BIASES,
    DECODER_DEFAULTS,
    EMBEDDINGS,
    FEED_FORWARD,
    HEAD_NORMS,
    NORMS,
    decoder_config,
    decoder_task,
    layer_row,
)
from lingvo_gshard.wings.open_models.families.experts import ExpertKeys, expert_rows, shared_rows
from lingvo_gshard.wings.open_models.families.family import (
    BIASES,
    FULL,
    Family,
    attention_of_layers,
    run_in_periods,
    set_pattern,
    types_of_layers,
)
from lingvo_gshard.wings.open_models.table import Table, TensorPattern
from lingvo_gshard.wings.published_layers.gated_delta_net import GatedDeltaNet

_LINEAR = "linear_attention"
_NET = "self_attention"
# The weights that every head of keys has, and those that every value has.
_KEYS, _VALUES = ("query", "key"), ("value", "gate")
# A weight that only the layers with a gated delta net have.
_RATE = f"decoder.{{layer}}.{_NET}.log_rate"
_GATED_QUERY = tuple(
    layer_row(
        f"self_attn.q_proj.{kind}",
        f"{_NET}.{ours}_{name}",
        f"(NgD){summed}->{summed}ND",
        choose=(("g", part, 2),),
        not_beside=_RATE,
    )
    for kind, ours, summed in (("weight", "w", "M"), ("bias", "b", ""))
    for part, name in enumerate(("query", "gate"))
)


def _one(published: str, ours: str, arrangement: str, **options: Any) -> TensorPattern:
    return layer_row(f"linear_attn.{published}", f"{_NET}.{ours}", arrangement, **options)


def _joined(published: str, arrangement: str, names: tuple[str, ...], letter: str) -> Table:
    """Returns the rows of weights that are one tensor.

    Args:
      published: name of the tensor within its layer.
      arrangement: see `TensorPattern`.
      names: names of the weights after "w_".
      letter: see `TensorPattern.joined`.
    """
    return tuple(
        _one(f"{published}.weight", f"w_{name}", arrangement, joined=letter, beside=_RATE)
        for name in names
    )


_TAPS = tuple(
    _one(
        "conv1d.weight",
        f"w_{name}_taps",
        f"({letters})ot->t{letters}",
        choose=(("o", 0, 1),),
        joined="N",
    )
    for name, letters in (("query", "ND"), ("key", "ND"), ("value", "Nrd"))
)
_COMMON = (
    *EMBEDDINGS,
    *_GATED_QUERY,
    *(dataclasses.replace(row, not_beside=_RATE) for row in ATTENTION[1:]),
    *ATTENTION_BIASES[1:],
    *HEAD_NORMS,
    *NORMS,
    *_TAPS,
    _one("A_log", "log_rate", "(Nr)->Nr"),
    _one("dt_bias", "b_decay", "(Nr)->Nr"),
    _one("norm.weight", "output_norm.scale", "M->M"),
    _one("out_proj.weight", "w_out", "M(Nrd)->NrdM"),
)
_EXPERTS = (
    *expert_rows("mlp"),
    *shared_rows("mlp.shared_expert"),
    layer_row(
        "mlp.shared_expert_gate.weight", "feed_forward.w_mix", "oM->M", choose=(("o", 0, 1),)
    ),
)
# Qwen3-Next publishes what belongs to a head of keys together.
_NEXT_TABLE = (
    *_COMMON,
    *_joined("in_proj_qkvz", "(NrD)M->MND", _KEYS, "r"),
    *_joined("in_proj_qkvz", "(Nrd)M->MNrd", _VALUES, "r"),
    *_joined("in_proj_ba", "(Nr)M->MNr", ("strength", "decay"), "r"),
    *_EXPERTS,
)
_TABLE = (
    *_COMMON,
    *_joined("in_proj_qkv", "(ND)M->MND", _KEYS, "N"),
    *_joined("in_proj_qkv", "(Nrd)M->MNrd", _VALUES[:1], "N"),
    _one("in_proj_z.weight", "w_gate", "(Nrd)M->MNrd"),
    _one("in_proj_b.weight", "w_strength", "(Nr)M->MNr"),
    _one("in_proj_a.weight", "w_decay", "(Nr)M->MNr"),
)
_COMMON_DEFAULTS = DECODER_DEFAULTS | {
    "attention_bias": False,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "partial_rotary_factor": 0.25,
}
_EXPERTS_DEFAULTS = _COMMON_DEFAULTS | {
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "num_key_value_heads": 2,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
}
_NEXT_DEFAULTS = _EXPERTS_DEFAULTS | {
    "decoder_sparse_step": 1,
    "intermediate_size": 5632,
    "mlp_only_layers": None,
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "vocab_size": 151936,
}
_DENSE_DEFAULTS = _COMMON_DEFAULTS | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "vocab_size": 248320,
}
_MOE_DEFAULTS = _EXPERTS_DEFAULTS | {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "vocab_size": 248320,
}
del _MOE_DEFAULTS["intermediate_size"]
_EXPERTS_KEYS = ExpertKeys()
_NEXT_KEYS = ExpertKeys(normalize="norm_topk_prob")


def _task(config: PublishedConfig, hidden: str = "intermediate_size") -> Params:
    """Returns a decoder of both kinds of layers.

    Args:
      config: the config.
      hidden: the key that has the size of H.
    """
    task = decoder_task(config, BIASES, hidden=hidden)
    config.expect("attn_output_gate", True)
    # The states are float32 here; only other layers predict further tokens.
    for name in ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        config.get(name, None)
    decoder = task.decoder
    decoder.layer.norm.zero_centered = True
    attention = decoder.layer.self_attention
    attention.set(qk_norm=True, has_output_gate=True, query_key_norm=decoder.layer.norm.copy())
    interval = config.get("full_attention_interval", 4, least=1)
    usual = [_LINEAR if (i + 1) % interval else FULL for i in range(decoder.num_layers)]
    attentions = {FULL: attention.copy(), _LINEAR: _delta_net(config)}
    set_pattern(config, decoder, types_of_layers(config, usual), attentions)
    return task


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


def _set_experts(config: PublishedConfig, task: Params, keys: ExpertKeys) -> Params:
    """Returns the task with experts in all layers, and a gated shared one."""
    moe = keys.read(config, task.decoder)
    shared = config.get("shared_expert_intermediate_size")
    moe.set(shared_hidden_dim=shared, shared_combination="gated")
    run_in_periods(task.decoder)
    return task


def _next_task(config: PublishedConfig) -> Params:
    config.expect("decoder_sparse_step", 1)
    config.expect("mlp_only_layers", [])
    key_dim, value_dim = (config.get(f"linear_{n}_head_dim") for n in ("key", "value"))
    if key_dim != value_dim:
        raise UserError(
            f"{config.where}: linear_value_head_dim is {value_dim}, which is not supported; "
            f"linear_key_head_dim={key_dim} was expected"
        )
    return _set_experts(config, _task(config), _NEXT_KEYS)


def _moe_task(config: PublishedConfig) -> Params:
    # All layers have experts.
    config.get("intermediate_size", None)
    return _set_experts(config, _task(config, "moe_intermediate_size"), _EXPERTS_KEYS)


def _config(task: Params) -> dict[str, Any]:
    layers = attention_of_layers(task.decoder)
    nets = [each for each in layers if each.cls is GatedDeltaNet]
    net = nets[0] if nets else GatedDeltaNet.params().set(num_heads=1, head_dim=1)
    return {
        **decoder_config(task, BIASES),
        "layer_types": [_LINEAR if each.cls is GatedDeltaNet else FULL for each in layers],
        "linear_conv_kernel_dim": net.convolution_width,
        "linear_key_head_dim": net.head_dim,
        "linear_num_key_heads": net.num_heads,
        "linear_num_value_heads": net.num_heads * net.values_per_head,
        "linear_value_head_dim": net.value_dim or net.head_dim,
    }


def _moe_config(task: Params, keys: ExpertKeys = _EXPERTS_KEYS) -> dict[str, Any]:
    return {
        **_config(task),
        **keys.config(task.decoder),
        "shared_expert_intermediate_size": task.decoder.moe.shared_hidden_dim,
    }


def _next_config(task: Params) -> dict[str, Any]:
    return {
        **_moe_config(task, _NEXT_KEYS),
        "intermediate_size": task.decoder.hidden_dim,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _further_tokens(config: PublishedConfig) -> tuple[str, ...]:
    """Returns the beginning of the tensors of layers that predict further tokens."""
    return ("mtp.",)


NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    table=_NEXT_TABLE,
    read_task=_next_task,
    config_of=_next_config,
    defaults=_NEXT_DEFAULTS,
    read_left_out=_further_tokens,
)
DENSE = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    table=(*_TABLE, *FEED_FORWARD),
    read_task=_task,
    config_of=_config,
    defaults=_DENSE_DEFAULTS,
    read_left_out=_further_tokens,
)
EXPERTS = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    table=(*_TABLE, *_EXPERTS),
    read_task=_moe_task,
    config_of=_moe_config,
    defaults=_MOE_DEFAULTS,
    read_left_out=_further_tokens,
)
