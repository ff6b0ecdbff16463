"""DeepSeek-V2 (arXiv 2405.04434), V3 (arXiv 2412.19437) and models made of their parts.

They have latent attention, and experts in groups.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.layers import Sequential, TopKRouter
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import experts, family
from lingvo_gshard.wings.open_models.families.decoder import decoder
from lingvo_gshard.wings.open_models.families.rope import mscale, rope_config, set_rope
from lingvo_gshard.wings.published_layers.indexed_attention import IndexedAttention, IndexedStack
from lingvo_gshard.wings.published_layers.latent_attention import LatentAttention
from lingvo_gshard.wings.published_layers.rotary_pairs import HALVES, NEIGHBORS
from lingvo_gshard.wings.published_layers.routers import GroupLimitedRouter

_GREEDY, _LIMITED = "greedy", "group_limited_greedy"
_OWN, _SHARED, _EVERY = "full", "shared", "index_topk_freq"
# Keys that are options of attentions with an indexer.
INDEXER = {
    "index_n_heads": "index_heads",
    "index_head_dim": "index_dim",
    "index_topk": "index_topk",
}


def read_latent(config: PublishedConfig, task: Params, rope: dict[str, Any] | None = None) -> None:
    """Sets latent attention.

    Args:
      rope: the rotary parameters. None takes the config's, whose `head_dim` rotates as a whole.
    """
    plain, rotated = config.get("qk_nope_head_dim"), config.get("qk_rope_head_dim")
    if rope is None:
        # The class rotates this many dimensions.
        config.expect("head_dim", rotated)
    has_bias = config.get("attention_bias", False)
    attention = LatentAttention.params().set(
        query_rank=config.get("q_lora_rank", 0),
        key_value_rank=config.get("kv_lora_rank"),
        plain_dim=plain,
        rotary_dim=rotated,
        value_dim=config.get("v_head_dim"),
        use_bias=has_bias,
        use_output_bias=has_bias,
        rotary_pairs=NEIGHBORS,
    )
    rope = config.rope() if rope is None else rope
    set_rope(config, attention, rope)
    if rope.get("mscale_all_dim") and rope["rope_type"] != "default":
        steeper = mscale(attention.rotary_scaling.factor, rope["mscale_all_dim"])
        attention.query_scale = (plain + rotated) ** -0.5 * steeper**2
    task.decoder.layer.self_attention = attention


def latent_config(task: Params) -> dict[str, Any]:
    """Returns what `read_latent` reads, from the Params of a task."""
    attention = task.decoder.layer.self_attention
    return {
        "num_key_value_heads": task.decoder.num_heads,
        "attention_bias": attention.use_bias,
        "q_lora_rank": attention.query_rank or None,
        "kv_lora_rank": attention.key_value_rank,
        "qk_nope_head_dim": attention.plain_dim,
        "qk_rope_head_dim": attention.rotary_dim,
        "head_dim": attention.rotary_dim,
        "v_head_dim": attention.value_dim,
        **rope_config(attention),
    }


def _read_pairs(config: PublishedConfig, task: Params) -> None:
    is_interleaved = config.get("rope_interleave", False)
    pairs = NEIGHBORS if is_interleaved else HALVES
    task.decoder.layer.self_attention.rotary_pairs = pairs


def _pairs_config(task: Params) -> dict[str, Any]:
    pairs = task.decoder.layer.self_attention.rotary_pairs
    return {"rope_interleave": pairs == NEIGHBORS}


def _read_softmax_experts(config: PublishedConfig, task: Params) -> None:
    method = config.expect("topk_method", _GREEDY, _LIMITED)
    hidden_dim = config.get("moe_intermediate_size")
    router = TopKRouter.params().set(
        k=config.get("num_experts_per_tok"),
        normalize=False,
        auxiliary_loss_weight=config.get("aux_loss_alpha", 0.001),
        scale=config.get("routed_scaling_factor", kind=float),
    )
    moe = experts.dropless_experts(router, config.get("n_routed_experts"), hidden_dim)
    moe.shared_hidden_dim = hidden_dim * config.get("n_shared_experts", 0)
    if method == _LIMITED:
        groups = experts.groups_of_experts(config, moe.router.k, "n_routed_experts")
        moe.router = GroupLimitedRouter.params().set(**dict(moe.router.items()), **groups)
    experts.place_experts(task.decoder, moe, experts.dense_layers(config, "first_k_dense_replace"))


def _softmax_experts_config(task: Params) -> dict[str, Any]:
    router = task.decoder.moe.router
    return {
        **experts.scaled_config(task),
        "topk_method": _LIMITED if router.cls is GroupLimitedRouter else _GREEDY,
        "aux_loss_alpha": router.auxiliary_loss_weight,
    }


_LATENT = (family.SILU, family.Part(read_latent, latent_config))
PAIRS = family.Part(_read_pairs, _pairs_config)
V2 = decoder("deepseek_v2", (*_LATENT, family.Part(_read_softmax_experts, _softmax_experts_config)))
V3 = decoder(
    "deepseek_v3", (*_LATENT, experts.scaled_experts(), PAIRS), read_left_out=family.extra_layers
)
# GLM-4.7-Flash.
GLM_LITE = decoder(
    "glm4_moe_lite",
    (*_LATENT, experts.scaled_experts(dense=1, by_type=True), PAIRS),
    read_left_out=family.extra_layers,
)
# Youtu-LLM (arXiv 2512.24618).
YOUTU = decoder("youtu", (*_LATENT, PAIRS))


def _read_indexer(config: PublishedConfig, task: Params) -> None:
    attention, decoder = IndexedAttention.params(), task.decoder
    for name, value in decoder.layer.self_attention.items():
        attention.set(**{name: value})
    decoder.layer.self_attention = attention
    usual = [family.INDEXED] * decoder.num_layers
    if family.types_of_layers(config, usual) != usual:
        config.expect("layer_types", usual)


def _read_choices(config: PublishedConfig, task: Params) -> None:
    """Sets which layers take the keys that an earlier layer's indexer chose."""
    decoder, layers = task.decoder, task.decoder.num_layers
    every = config.get(_EVERY, 1, object)
    every = max(every if isinstance(every, bool) else config.get(_EVERY, 1, float), 1)
    offset = config.get("index_skip_topk_offset", 2, int)
    usual = [_SHARED if max(i - offset + 1, 0) % every else _OWN for i in range(layers)]
    letters = config.get("index_topk_pattern", None, object)
    if letters is not None:
        usual = [{"F": _OWN, "S": _SHARED}.get(each, each) for each in letters][:layers]
    kinds = family.types_of_layers(config, usual, "indexer_types", may_be_longer=True)
    if len(kinds) != layers or not {*kinds} <= {_OWN, _SHARED} or kinds[0] != _OWN:
        raise UserError(
            f"{config.where}: indexers of the layers are {kinds}; {layers} of {_OWN!r} and "
            f"{_SHARED!r} were expected, the first one {_OWN!r}"
        )
    if _SHARED not in kinds:
        return
    own = [i for i, kind in enumerate(kinds) if kind == _OWN]
    stack = task.decoder = family.stack_of(IndexedStack, decoder)
    stack.choosers = tuple(max(i for i in own if i <= index) for index in range(layers))
    periods = [
        (start, period)
        for start in own
        for period in range(1, layers - start)
        if start >= decoder.dense_first and not (layers - start) % period
        if kinds[start + period :] == kinds[start:-period]
    ]
    stack.execution = decoder.execution if periods else Sequential.params()
    stack.sequential_first, period = min(periods, key=sum, default=(0, 1))
    stack.attention_pattern = (stack.layer.self_attention,) * period


def _choices_config(task: Params) -> dict[str, Any]:
    count, stack = range(task.decoder.num_layers), task.decoder
    choosers = stack.choosers if stack.cls is IndexedStack else count
    return {"indexer_types": [_OWN if choosers[i] == i else _SHARED for i in count]}


# Sparse attention (arXiv 2512.02556): an indexer chooses the tokens that each token attends to.
_INDEXED = (
    *_LATENT,
    experts.scaled_experts(by_type=True),
    family.Part(_read_indexer),
    *(family.setting(key, f"attention.{name}") for key, name in INDEXER.items()),
)
V32 = decoder("deepseek_v32", _INDEXED, read_left_out=family.extra_layers)
GLM5 = decoder(
    "glm_moe_dsa",
    (
        *_INDEXED,
        family.always({"attention.index_pairs": NEIGHBORS}),
        family.Part(_read_choices, _choices_config),
    ),
    read_left_out=family.extra_layers,
)
# Its config names the classes of DeepSeek-V3.
KIMI_K2 = dataclasses.replace(V3, model_type="kimi_k2")
