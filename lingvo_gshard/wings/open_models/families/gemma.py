"""Gemma (arXiv 2403.08295), Gemma 2 (2408.00118), and the text models of Gemma 3 and 4.

Gemma 3: arXiv 2503.19786. Gemma 4: https://ai.google.dev/gemma/docs/core/model_card_4
"""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params
from lingvo_gshard.layers import Sequential
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import family, rope
from lingvo_gshard.wings.open_models.families.decoder import NORMS_BY_HEAD, decoder
from lingvo_gshard.wings.open_models.families.experts import experts
from lingvo_gshard.wings.published_layers.gemma4 import ExpertsBeside, NormalizedRouter, ScaledLayer
from lingvo_gshard.wings.published_layers.gemma4_small import SharedKeysStack, keys_of_layers

_GELU, _GEGLU = "gelu_pytorch_tanh", "geglu_tanh"
# The rotary bases of Gemma 3: in layers with a window, and in layers with full attention.
_LOCAL_BASE, _GLOBAL_BASE = 1e4, 1e6
_BASES = {family.SLIDING: _LOCAL_BASE, family.FULL: _GLOBAL_BASE}
# Full attention of Gemma 4 without rotary parameters.
_PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
_HEADS, _FINAL_CAP = "num_key_value_heads", "final_logit_softcapping"
_BORROWING = "num_kv_shared_layers"


def _read_attention(config: PublishedConfig, task: Params) -> None:
    task.decoder.layer.self_attention.set(
        query_scale=config.get("query_pre_attn_scalar", kind=float, least=1) ** -0.5,
        logit_cap=family.above_zero(config, "attn_logit_softcapping", null=0.0),
    )
    task.logit_cap = family.above_zero(config, _FINAL_CAP, null=0.0)


def _attention_config(task: Params) -> dict[str, Any]:
    attention = family.pattern_of(task.decoder)[0]
    scale = attention.query_scale or (attention.head_dim or task.model_dim) ** -0.5
    return {
        "query_pre_attn_scalar": round(scale**-2, 6),
        "attn_logit_softcapping": attention.logit_cap or None,
        _FINAL_CAP: task.logit_cap or None,
    }


def _gemma3_kinds(config: PublishedConfig) -> list[str]:
    """Returns the type of each layer's attention."""
    return family.layer_types(config, config.get("sliding_window_pattern", 6, least=1))


def _gemma3_attentions(config: PublishedConfig, attention: Params) -> dict[str, Params]:
    """Returns type -> Params of the self-attention."""
    bases = {family.FULL: "rope_theta", family.SLIDING: "rope_local_base_freq"}
    ropes = {kind: config.get(name, None, float) for kind, name in bases.items()}
    return rope.rotated_by_type(config, attention, ropes)


def _gemma3_layers_config(task: Params) -> dict[str, Any]:
    ropes = rope.ropes_config(family.pattern_of(task.decoder), _BASES)
    return {**ropes, **family.windows_config(task.decoder)}


def _set_norms(config: PublishedConfig, task: Params) -> None:
    del config
    norm = task.decoder.layer.norm.copy()
    task.decoder.layer.self_attention.set(qk_norm=True, query_key_norm=norm)


_GEMMA4_EXPERTS = experts(k="top_k_experts", coefficient=0.0, router=NormalizedRouter)


def _read_gemma4(config: PublishedConfig, task: Params) -> None:
    """Sets the layers. `_read_shared_keys` adds what only E2B and E4B have."""
    # With "vision", texts are causal.
    config.expect("use_bidirectional_attention", None, "vision")
    task.set(embedding_scale=0.0, logit_cap=family.above_zero(config, _FINAL_CAP, null=0.0))
    decoder, norm = task.decoder, task.decoder.layer.norm
    decoder.layer = ScaledLayer.params().set(**dict(decoder.layer.items()))
    decoder.layer.norm_position, decoder.layer.feed_forward.activation = "both", _GEGLU
    decoder.layer.self_attention.set(query_scale=1.0, normalizes_values=True)
    if config.get("enable_moe_block", False):
        _GEMMA4_EXPERTS.read(config, task)
        moe = ExpertsBeside.params().set(**dict(decoder.moe.items()), norm=norm.copy())
        moe.experts.activation, moe.router.norm = _GEGLU, norm.copy()
        decoder.moe = moe.set(shared_hidden_dim=decoder.hidden_dim)


def _gemma4_config(task: Params) -> dict[str, Any]:
    has_experts = bool(task.decoder.moe_every)
    return {
        _FINAL_CAP: task.logit_cap or None,
        "enable_moe_block": has_experts,
        **(_GEMMA4_EXPERTS.values(task) if has_experts else {}),
    }


def _read_shared_keys(config: PublishedConfig, task: Params) -> None:
    """Sets the stack of the smallest models: keys of other layers, and inputs of each layer."""
    size = config.get("hidden_size_per_layer_input", kind=int, least=0)
    borrowing = config.get(_BORROWING, kind=int, least=0)
    if not size and not borrowing:
        return
    stack = family.stack_of(SharedKeysStack, task.decoder)
    stack.set(borrowing_last=borrowing, execution=Sequential.params(), sequential_first=0)
    stack.layer.input_dim = size
    if borrowing:
        stack.widens_borrowers = config.get("use_double_wide_mlp", False)
    if size:
        vocabulary = config.get("vocab_size_per_layer_input", kind=int, least=task.vocabulary_size)
        stack.layer_inputs.vocabulary_size = vocabulary
    windows = [each.window for each in family.attention_of_layers(stack)]
    keys_of_layers(windows, borrowing, f"{config.where}: {_BORROWING}")
    task.decoder = stack


def _shared_keys_config(task: Params) -> dict[str, Any]:
    stack = task.decoder
    if stack.cls is not SharedKeysStack:
        return {"hidden_size_per_layer_input": 0, _BORROWING: 0}
    return {
        "hidden_size_per_layer_input": stack.layer.input_dim,
        _BORROWING: stack.borrowing_last,
        "use_double_wide_mlp": stack.widens_borrowers,
        "vocab_size_per_layer_input": stack.layer_inputs.vocabulary_size or task.vocabulary_size,
    }


def _gemma4_left_out(config: PublishedConfig) -> tuple[str, ...]:
    """Returns the weights of keys and values that files have for layers which borrow them."""
    layers = config.get("num_hidden_layers")
    first = max(layers - config.get(_BORROWING, kind=int, least=0), 0)
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    return tuple(f"model.layers.{i}.self_attn.{n}." for i in range(first, layers) for n in names)


def _gemma4_kinds(config: PublishedConfig) -> list[str]:
    """Returns the type of each layer's attention. The last one is full, as in transformers."""
    return [*family.layer_types(config, period=6)[:-1], family.FULL]


def _gemma4_attentions(config: PublishedConfig, attention: Params) -> dict[str, Params]:
    """Returns type -> Params of the self-attention. Full attention has heads of another size."""
    is_given = config.is_given("rope_parameters")
    attentions = rope.rotated_by_type(
        config, attention, dict.fromkeys(_BASES) if is_given else _BASES
    )
    full = attentions[family.FULL].set(has_value_weight=not config.get("attention_k_eq_v", False))
    if not is_given:
        rope.set_rope(config, full, {**_PROPORTIONAL, "rope_theta": _GLOBAL_BASE})
    usual = {"head_dim": config.get("global_head_dim", 512, least=1)}
    heads = config.get("num_global_key_value_heads", attention.num_key_value_heads, least=1)
    if not full.has_value_weight:
        usual[_HEADS] = heads
    kinds, found = _gemma4_kinds(config), config.get("per_layer_config", None, dict)
    if found is None and "per_layer_config" in config.values:
        usual = {}
    if found is not None:
        # transformers writes these sizes for each layer, and then reads no other key.
        own = found.get(str(kinds.index(family.FULL)))
        names = ("head_dim", _HEADS) if isinstance(own, dict) else ()
        usual = {name: own[name] for name in names if name in own}
        each = {str(i): usual for i, kind in enumerate(kinds) if usual and kind == family.FULL}
        config.expect("per_layer_config", each)
    full.set(**usual)
    return attentions


def _gemma4_layers_config(task: Params) -> dict[str, Any]:
    pattern, windows = family.pattern_of(task.decoder), family.windows_config(task.decoder)
    full = next(each for each in pattern if not each.window)
    near = next((each for each in pattern if each.window), full)
    return {
        **rope.ropes_config(pattern, _BASES),
        **windows,
        "sliding_window": windows["sliding_window"] or 512,
        "head_dim": near.head_dim,
        "num_key_value_heads": near.num_key_value_heads,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.num_key_value_heads,
        "attention_k_eq_v": not full.has_value_weight,
    }


# Parts of all generations, without rotations.
_COMMON = (
    family.always(
        {
            "decoder.layer.norm.zero_centered": True,
            "decoder.layer.feed_forward.activation": _GEGLU,
            # 0 stands for the square root of the model dimension.
            "embedding_scale": 0.0,
        }
    ),
)
_ATTENTION = family.Part(_read_attention, _attention_config)
# Parts of Gemma 2 and 3.
_LATER = (*_COMMON, family.always({"decoder.layer.norm_position": "both"}), _ATTENTION)
GEMMA = decoder(
    "gemma",
    (
        *_COMMON,
        # Old files name another function, and transformers takes this one for it.
        family.activation(_GELU, "gelu"),
        rope.ROPE,
    ),
)
_ALTERNATING = (rope.ROPE, family.layered(lambda config: family.layer_types(config, period=2)))
GEMMA2 = decoder("gemma2", (*_LATER, *_ALTERNATING))
# VaultGemma (arXiv 2510.15001) has no norms of outputs.
VAULT_GEMMA = decoder("vaultgemma", (*_COMMON, _ATTENTION, *_ALTERNATING))
GEMMA3 = decoder(
    "gemma3_text",
    (
        *_LATER,
        family.Part(_set_norms),
        family.layered(_gemma3_kinds, _gemma3_attentions, _gemma3_layers_config),
    ),
)
GEMMA4 = decoder(
    "gemma4_text",
    (
        family.Part(_read_gemma4, _gemma4_config),
        NORMS_BY_HEAD,
        family.BIASES,
        family.layered(_gemma4_kinds, _gemma4_attentions, _gemma4_layers_config),
        family.Part(_read_shared_keys, _shared_keys_config),
    ),
    read_positions=family.given_positions,
    read_left_out=_gemma4_left_out,
)
