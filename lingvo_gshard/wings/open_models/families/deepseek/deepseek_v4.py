"""DeepSeek-V4: compressed attention, residual streams, and experts chosen by token ids.

https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core import Params, names
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import family
from lingvo_gshard.wings.open_models.families.decoder import decoder
from lingvo_gshard.wings.open_models.families.deepseek.deepseek_v3 import INDEXER
from lingvo_gshard.wings.open_models.families.experts import (
    dropless_experts,
    loss_coefficient,
    loss_weight,
)
from lingvo_gshard.wings.open_models.families.rope import rope_config, rotated_dimensions, set_rope
from lingvo_gshard.wings.published_layers.compressed_attention import CompressedAttention
from lingvo_gshard.wings.published_layers.hyper_connections import HyperStack
from lingvo_gshard.wings.published_layers.rotary_pairs import NEIGHBORS
from lingvo_gshard.wings.published_layers.routers import LookupRouter, SoftplusRouter

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {_SPARSE: 4, _HEAVY: 128}
_OF_RATE = {"0": family.SLIDING, "4": _SPARSE, "128": _HEAVY}
_HASHED, _LEARNED = "hash_moe", "moe"
# Keys with the number of layers with hashed experts. The first one that is given counts.
_HASH_COUNTS, _USUAL_HASHED = ("num_hash_layers", "default_num_hash_layers"), 3
# The share of a head that rotates, and the base of the rotation, where no key says so.
_SHARE, _BASE = 64 / 512, 10_000.0
_FACTOR = "partial_rotary_factor"
_MIXER = "decoder.layer.mixer"
# Keys that are options of the attention of all layers.
_OPTIONS = {
    "head_dim": "head_dim",
    "q_lora_rank": "query_rank",
    "o_groups": "output_groups",
    "o_lora_rank": "output_rank",
}


def _read_streams(config: PublishedConfig, task: Params) -> None:
    task.decoder = family.stack_of(HyperStack, task.decoder)
    layer = task.decoder.layer
    layer.mixer.norm = layer.norm.copy()


def _kinds(config: PublishedConfig) -> list[str]:
    """Returns the type of each layer's attention."""
    rates = [4 if i > 2 and i % 2 else 128 for i in range(config.get("num_hidden_layers"))]
    if config.is_given("layer_types"):
        config.skip("compress_ratios")
    else:
        # The last ones are of layers that predict further tokens.
        rates = family.types_of_layers(config, rates, "compress_ratios", may_be_longer=True)
    kinds = [_OF_RATE.get(str(rate), f"compress_ratios of {rate}") for rate in rates]
    return family.types_of_layers(config, kinds, may_be_longer=True)


def _ropes(config: PublishedConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the rotary parameters of layers without and with windows."""
    base, head_dim = config.get("compress_rope_theta", kind=float), config.get("head_dim")
    share = config.get(_FACTOR, None, float)
    rotated = config.get("qk_rope_head_dim", None, int)
    if share is None:
        share = _SHARE if rotated is None else rotated / head_dim
    flat = config.rope()
    given = [flat.pop(name, None) for name in ("main", "compress")]
    if all(isinstance(each, dict) for each in given):
        main, compressed = given
        return {_FACTOR: share, **main}, {_FACTOR: share, **compressed}
    # The base of flat parameters is not read.
    main_base = config.get("rope_theta", _BASE, float)
    main = {"rope_type": "default", "rope_theta": main_base, _FACTOR: share}
    compressed = {**flat, "rope_theta": base, _FACTOR: share}
    if compressed["rope_type"] == "yarn":
        compressed.setdefault("attention_factor", 1.0)
    return main, compressed


def _attention(config: PublishedConfig, task: Params, rope: dict[str, Any]) -> Params:
    """Returns an attention without windows."""
    attention = CompressedAttention.params().set(
        window=family.sliding_window(config),
        rotary_dim=rotated_dimensions(config, config.get("head_dim"), rope.pop(_FACTOR)),
        rotary_pairs=NEIGHBORS,
        norm=task.decoder.layer.norm.copy(),
        **{option: config.get(key) for key, option in _OPTIONS.items()},
    )
    set_rope(config, attention, rope)
    if attention.rotary_scaling.cls.needs_lengths:
        config.expect("rope_parameters", None, beside="compressed windows")
    return attention


def _read_attentions(config: PublishedConfig, task: Params) -> None:
    main, compressed = (_attention(config, task, rope) for rope in _ropes(config))
    rates = {**_RATES, **(config.get("compress_rates", None, dict) or {})}
    for kind, key in ((_SPARSE, "compress_rate_csa"), (_HEAVY, "compress_rate_hca")):
        rates[kind] = config.get(key, rates[kind], int, 1)
    indexer = {option: config.get(key) for key, option in INDEXER.items()}
    heavy, sparse = (compressed.copy().set(compressed=rates[kind]) for kind in (_HEAVY, _SPARSE))
    attentions = {
        family.SLIDING: main,
        _HEAVY: heavy,
        _SPARSE: sparse.set(overlaps=True, **indexer),
    }
    kinds = _kinds(config)
    for kind in kinds:
        names.check(kind, attentions, f"{config.where}: the layer type {kind!r} is unknown")
    _set_layers(task.decoder, [attentions[kind] for kind in kinds])


def _set_layers(stack: Params, layers: Sequence[Params]) -> None:
    """Sets the attentions of some first layers, and a pattern that all other layers repeat."""
    count = len(layers)

    def first(period: int) -> int:
        differ = (i for i in range(count - period) if layers[i] != layers[i + period])
        return max(differ, default=-1) + 1

    period = min(range(1, count + 1), key=lambda period: first(period) + period)
    start = first(period)
    # The pattern counts from the first layer of all.
    pattern = [layers[start + (index - start) % period].copy() for index in range(period)]
    stack.layer.self_attention = pattern[0]
    stack.attention_pattern = tuple(pattern) if period > 1 else ()
    stack.first_attentions = tuple(each.copy() for each in layers[:start])


def _layers(stack: Params) -> list[Params]:
    """Returns the Params of each layer's attention."""
    pattern, first = family.pattern_of(stack), stack.first_attentions
    rest = range(len(first), stack.num_layers)
    return [*first, *(pattern[index % len(pattern)] for index in rest)]


def _attentions_config(task: Params) -> dict[str, Any]:
    layers = _layers(task.decoder)
    kinds = [
        family.SLIDING if not a.compressed else _SPARSE if a.index_heads else _HEAVY for a in layers
    ]
    of_kind = dict(zip(kinds, layers, strict=True))
    any_ = layers[0]
    share = any_.rotary_dim / any_.head_dim
    windowed = of_kind.get(_SPARSE) or of_kind.get(_HEAVY) or any_
    ropes = {
        name: {**rope_config(each)["rope_parameters"], _FACTOR: share}
        for name, each in (("main", of_kind.get(family.SLIDING, any_)), ("compress", windowed))
    }
    rates = {kind: of_kind[kind].compressed for kind in _RATES if kind in of_kind}
    indexer = INDEXER if _SPARSE in of_kind else {}
    return {
        **{key: any_.get(option) for key, option in _OPTIONS.items()},
        **{key: of_kind[_SPARSE].get(option) for key, option in indexer.items()},
        "layer_types": kinds,
        "compress_rates": _RATES | rates,
        "rope_parameters": ropes,
        _FACTOR: share,
        "num_key_value_heads": 1,
        "sliding_window": any_.window + 1,
    }


def _read_experts(config: PublishedConfig, task: Params) -> None:
    stack, k = task.decoder, config.get("num_experts_per_tok")
    config.expect("scoring_func", "sqrtsoftplus")
    layers = stack.num_layers
    is_given = config.is_given("mlp_layer_types")
    kind = object if is_given else int
    counts = (config.get(key, None, kind) for key in _HASH_COUNTS)
    count = next((n for n in [*counts] if n is not None), _USUAL_HASHED)
    usual = _mlp_types(0 if is_given else min(max(count, 0), layers), layers)
    types = family.types_of_layers(config, usual, "mlp_layer_types", may_be_longer=True)
    hashed = types.count(_HASHED)
    if types != _mlp_types(hashed, layers):
        config.expect("mlp_layer_types", _mlp_types(hashed, layers))
    router = SoftplusRouter.params()
    lookup = LookupRouter.params().set(vocabulary_size=task.vocabulary_size)
    for each in (router, lookup):
        each.set(k=k, scale=config.get("routed_scaling_factor", kind=float))
    hidden_dim = config.get("moe_intermediate_size")
    moe = dropless_experts(router, config.get("n_routed_experts"), hidden_dim)
    moe.experts.set(activation="clamped_swiglu", gate_alpha=1.0, gate_offset=0.0)
    moe.shared_hidden_dim = hidden_dim
    stack.set(moe_every=1, moe=moe, first_routed=hashed, first_router=lookup)
    router.auxiliary_loss_weight = loss_weight(config.get("router_aux_loss_coef", 0.0), stack, k)
    family.run_in_periods(stack, max(hashed, len(stack.first_attentions)))


def _mlp_types(hashed: int, layers: int) -> list[str]:
    return [_HASHED] * hashed + [_LEARNED] * (layers - hashed)


def _experts_config(task: Params) -> dict[str, Any]:
    stack, moe = task.decoder, task.decoder.moe
    router = moe.router
    return {
        "num_experts_per_tok": router.k,
        "n_routed_experts": moe.num_experts,
        "moe_intermediate_size": moe.hidden_dim,
        "routed_scaling_factor": router.scale,
        "mlp_layer_types": _mlp_types(stack.first_routed, stack.num_layers),
        "router_aux_loss_coef": loss_coefficient(router.auxiliary_loss_weight, stack, router.k),
    }


FAMILY = decoder(
    "deepseek_v4",
    (
        family.SILU,
        family.Part(_read_streams),
        family.setting("hc_mult", f"{_MIXER}.streams"),
        family.setting("hc_sinkhorn_iters", f"{_MIXER}.iterations"),
        family.setting("hc_eps", f"{_MIXER}.epsilon", kind=float),
        family.Part(_read_attentions, _attentions_config),
        family.Part(_read_experts, _experts_config),
        family.setting("swiglu_limit", "decoder.moe.experts.gate_limit", kind=float),
    ),
    hidden="moe_intermediate_size",
    read_positions=lambda config: (config.get("max_position_embeddings"), False),
)
