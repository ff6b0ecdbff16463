"""Hunyuan, dense and with experts (arXiv 2411.02265): norms of rotated queries and keys."""

from __future__ import annotations

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
    NORMS,
    layer_row,
    plain_config,
    plain_task,
)
from lingvo_gshard.wings.open_models.families.experts import expert_rows, shared_rows, top_k_experts
from lingvo_gshard.wings.open_models.families.family import BIASES, Family
from lingvo_gshard.wings.open_models.families.rope import rope_config, set_rope
from lingvo_gshard.wings.published_layers.rotary_scaling import AlphaNTKScaling

_ROWS = (
    *EMBEDDINGS,
    *ATTENTION,
    *ATTENTION_BIASES,
    *NORMS,
    layer_row("self_attn.query_layernorm.weight", "self_attention.query_norm.scale", "M->M"),
    layer_row("self_attn.key_layernorm.weight", "self_attention.key_norm.scale", "M->M"),
)
# Keys of published files that no class of transformers reads, with the values that they may have.
_UNREAD: dict[str, tuple[Any, ...]] = {
    "cla_share_factor": (),
    "dense_list": (),
    "norm_type": ("rms",),
    "position_embedding_xdrope": (False,),
    "use_cla": (False,),
    "use_mla": (False,),
    "use_qk_norm": (True,),
    "use_rotary_pos_emb": (True,),
}
_EXPERTS_UNREAD: dict[str, tuple[Any, ...]] = {
    "group_limited_greedy": (False,),
    "moe_drop_tokens": (False,),
    "moe_layer_num_skipped": (0,),
    "moe_random_routing_dropped_token": (False,),
    "norm_topk_prob": (True,),
    "routed_scaling_factor": (1.0,),
    "use_mixed_mlp_moe": (True,),
}
# Parameters that files give beside `alpha`, and that nobody reads then.
_BESIDE_ALPHA = ("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim", "type")
_DEFAULTS = DECODER_DEFAULTS | {
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "vocab_size": 290943,
}
_EXPERTS_DEFAULTS = _DEFAULTS | {"moe_topk": 1, "num_experts": 1}


def _task(config: PublishedConfig) -> Params:
    config.expect("hidden_act", "silu")
    _expect(config, _UNREAD)
    for name in ("eod_token_id", "attention_head_dim"):
        config.get(name, None)
    task = plain_task(config, BIASES)
    attention = task.decoder.layer.self_attention
    attention.set(qk_norm=True, normalizes_rotated=True)
    attention.query_key_norm.epsilon = task.decoder.layer.norm.epsilon
    rope = config.rope()
    if rope["rope_type"] == "dynamic" and rope.get("alpha"):
        plain = {k: v for k, v in rope.items() if k not in (*_BESIDE_ALPHA, "alpha")}
        set_rope(config, attention, plain | {"rope_type": "default"})
        attention.rotary_scaling = AlphaNTKScaling.params().set(alpha=float(rope["alpha"]))
    else:
        set_rope(config, attention, rope)
    return task


def _expect(config: PublishedConfig, keys: dict[str, tuple[Any, ...]]) -> None:
    """Checks keys that may have only some values; without values, all are allowed."""
    for name, valid in keys.items():
        if valid:
            config.expect(name, *valid)
        else:
            config.get(name, None)


def _config(task: Params) -> dict[str, Any]:
    attention = task.decoder.layer.self_attention
    scaling = attention.rotary_scaling
    if scaling.cls is AlphaNTKScaling:
        base = attention.rotary_base
        rope = {"rope_type": "dynamic", "rope_theta": base, "alpha": scaling.alpha}
        values: dict[str, Any] = {"rope_parameters": rope}
    else:
        values = rope_config(attention)
    return {
        **plain_config(task, BIASES),
        **values,
        "hidden_act": "silu",
    }


def _experts_task(config: PublishedConfig) -> Params:
    task = _task(config)
    _expect(config, _EXPERTS_UNREAD)
    hidden_dim = config.get("intermediate_size")
    moe = top_k_experts(
        experts=_of_all_layers(config, "num_experts", config.get("num_experts", None, object)),
        k=_of_all_layers(config, "moe_topk", config.get("moe_topk", None, object)),
        hidden_dim=hidden_dim,
        normalize=True,
        balance_weight=0.0,
    )
    for name, value in (("moe_intermediate_size", hidden_dim), ("num_shared_expert", 1)):
        _of_all_layers(config, name, config.get(name, value, object), value)
    moe.shared_hidden_dim = hidden_dim
    task.decoder.set(moe_every=1, moe=moe)
    return task


def _of_all_layers(
    config: PublishedConfig, name: str, value: object, expected: int | None = None
) -> int:
    """Returns a whole number that a config may have once or for each layer.

    Args:
      config: the config, for messages.
      name: the key.
      value: its value.
      expected: the only number that is supported; None for any.

    Raises:
      UserError: layers differ, or the number is no supported one.
    """
    values = set(value) if isinstance(value, list) else {value}
    found = values.pop() if len(values) == 1 else None
    if not isinstance(found, int) or found < 1 or expected not in (None, found):
        wanted = "one whole number for all layers" if expected is None else expected
        raise UserError(f"{config.where}: {name} is {value!r}; {wanted} was expected")
    return found


def _experts_config(task: Params) -> dict[str, Any]:
    moe = task.decoder.moe
    return {
        **_config(task),
        "intermediate_size": moe.hidden_dim,
        "num_experts": moe.num_experts,
        "moe_topk": moe.router.k,
    }


DENSE = Family(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    table=(*_ROWS, *FEED_FORWARD),
    read_task=_task,
    config_of=_config,
    defaults=_DEFAULTS,
)
EXPERTS = Family(
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    table=(*_ROWS, *expert_rows("mlp", router="gate.wg"), *shared_rows("mlp.shared_mlp")),
    read_task=_experts_task,
    config_of=_experts_config,
    defaults=_EXPERTS_DEFAULTS,
    aliases={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
)
