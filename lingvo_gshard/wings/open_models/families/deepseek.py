"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): latent attention, experts in groups."""

from __future__ import annotations

import dataclasses
from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import (
    DECODER_DEFAULTS,
    EMBEDDINGS,
    FEED_FORWARD,
    NORMS,
    layer_row,
    plain_config,
    plain_task,
)
from lingvo_gshard.wings.open_models.families.experts import (
    EXPERT_ALIASES,
    SHARED_EXPERT,
    dense_layers,
    expert_rows,
    set_sigmoid_experts,
    sigmoid_config,
    top_k_experts,
)
from lingvo_gshard.wings.open_models.families.family import Family, extra_layers
from lingvo_gshard.wings.open_models.families.rope import mscale, rope_config, set_rope
from lingvo_gshard.wings.open_models.table import TensorPattern
from lingvo_gshard.wings.published_layers.indexed_attention import IndexedAttention
from lingvo_gshard.wings.published_layers.latent_attention import LatentAttention
from lingvo_gshard.wings.published_layers.rotary_pairs import HALVES, NEIGHBORS
from lingvo_gshard.wings.published_layers.routers import GroupLimitedRouter

_GREEDY, _LIMITED = "greedy", "group_limited_greedy"


def _row(published: str, ours: str, arrangement: str, joined: str = "") -> TensorPattern:
    return layer_row(f"self_attn.{published}", f"self_attention.{ours}", arrangement, joined=joined)


_ATTENTION = (
    _row("q_proj.weight", "w_query", "(ND)M->MND"),
    _row("q_a_proj.weight", "w_query_down", "qM->Mq"),
    _row("q_a_proj.bias", "b_query_down", "q->q"),
    _row("q_a_layernorm.weight", "query_norm.scale", "M->M"),
    _row("q_b_proj.weight", "w_query", "(ND)q->qND"),
    _row("kv_a_proj_with_mqa.weight", "w_latent", "rM->Mr", joined="r"),
    _row("kv_a_proj_with_mqa.weight", "w_rotary_key", "DM->MD", joined="D"),
    _row("kv_a_proj_with_mqa.bias", "b_latent", "r->r", joined="r"),
    _row("kv_a_proj_with_mqa.bias", "b_rotary_key", "D->D", joined="D"),
    _row("kv_a_layernorm.weight", "latent_norm.scale", "M->M"),
    _row("kv_b_proj.weight", "w_key", "(ND)r->rND", joined="D"),
    _row("kv_b_proj.weight", "w_value", "(ND)r->rND", joined="D"),
    _row("o_proj.weight", "w_out", "M(ND)->NDM"),
    _row("o_proj.bias", "b_out", "M->M"),
)
_INDEXER = (
    _row("indexer.wq_b.weight", "w_index_query", "(ND)q->qND"),
    _row("indexer.wk.weight", "w_index_key", "DM->MD"),
    _row("indexer.weights_proj.weight", "w_index_head", "NM->MN"),
    _row("indexer.k_norm.weight", "index_norm.scale", "M->M"),
    _row("indexer.k_norm.bias", "index_norm.bias", "M->M"),
)
_TABLE = (*EMBEDDINGS, *_ATTENTION, *NORMS, *FEED_FORWARD, *expert_rows("mlp"), *SHARED_EXPERT)
_DEFAULTS = DECODER_DEFAULTS | {
    "attention_bias": False,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "mlp_bias": False,
    "moe_intermediate_size": 1407,
    "n_group": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": None,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.0,
    "topk_group": None,
    "topk_method": _GREEDY,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
_V3_DEFAULTS = {
    key: value for key, value in _DEFAULTS.items() if key not in ("mlp_bias", "topk_method")
} | {
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "rope_interleave": True,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "vocab_size": 129280,
}
_V32_DEFAULTS = {
    key: value
    for key, value in _V3_DEFAULTS.items()
    if key not in ("num_nextn_predict_layers", "rope_interleave")
} | {
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "max_position_embeddings": 163840,
}


def _latent_task(config: PublishedConfig) -> Params:
    config.expect("hidden_act", "silu")
    task = plain_task(config)
    # The first is derived from other sizes, the second and third are of another library.
    for name in ("qk_head_dim", "ep_size", "moe_layer_freq", "num_key_value_heads"):
        config.get(name, None)
    plain, rotated = config.get("qk_nope_head_dim"), config.get("qk_rope_head_dim")
    has_bias = config.get("attention_bias", False)
    attention = LatentAttention.params().set(
        query_rank=config.get("q_lora_rank", 0),
        key_value_rank=config.get("kv_lora_rank"),
        plain_dim=plain,
        rotary_dim=rotated,
        value_dim=config.get("v_head_dim"),
        use_bias=has_bias,
        use_output_bias=has_bias,
    )
    rope = config.rope()
    set_rope(config, attention, rope)
    if rope.get("mscale_all_dim") and rope["rope_type"] != "default":
        steeper = mscale(attention.rotary_scaling.factor, rope["mscale_all_dim"])
        attention.query_scale = (plain + rotated) ** -0.5 * steeper**2
    task.decoder.layer.self_attention = attention
    return task


def _latent_config(task: Params) -> dict[str, Any]:
    attention = task.decoder.layer.self_attention
    config = plain_config(task)
    config["num_key_value_heads"] = task.decoder.num_heads
    del config["head_dim"]
    return {
        **config,
        **rope_config(attention),
        "hidden_act": "silu",
        "attention_bias": attention.use_bias,
        "q_lora_rank": attention.query_rank or None,
        "kv_lora_rank": attention.key_value_rank,
        "qk_nope_head_dim": attention.plain_dim,
        "qk_rope_head_dim": attention.rotary_dim,
        "v_head_dim": attention.value_dim,
    }


def _v3_task(config: PublishedConfig) -> Params:
    task = _latent_task(config)
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    for name in ("aux_loss_alpha", "seq_aux"):
        config.get(name, None)
    interleaved = config.get("rope_interleave", False)
    pairs = NEIGHBORS if interleaved else HALVES
    task.decoder.layer.self_attention.rotary_pairs = pairs
    set_sigmoid_experts(config, task.decoder)
    return task


def _v3_config(task: Params) -> dict[str, Any]:
    is_interleaved = task.decoder.layer.self_attention.rotary_pairs == NEIGHBORS
    return {
        **_latent_config(task),
        **sigmoid_config(task.decoder),
        "rope_interleave": is_interleaved,
    }


def _v2_task(config: PublishedConfig) -> Params:
    task = _latent_task(config)
    config.expect("mlp_bias", False)
    config.expect("scoring_func", "softmax")
    config.expect("norm_topk_prob", False)
    method = config.expect("topk_method", _GREEDY, _LIMITED)
    config.get("seq_aux", None)
    task.decoder.layer.self_attention.rotary_pairs = NEIGHBORS
    hidden_dim = config.get("moe_intermediate_size")
    moe = top_k_experts(
        experts=config.get("n_routed_experts"),
        k=config.get("num_experts_per_tok"),
        hidden_dim=hidden_dim,
        normalize=False,
        balance_weight=config.get("aux_loss_alpha", 0.001),
    )
    moe.shared_hidden_dim = hidden_dim * config.get("n_shared_experts", 0)
    moe.router.scale = config.get("routed_scaling_factor", kind=float)
    groups, chosen = config.get("n_group", 0), config.get("topk_group", 0)
    if method == _LIMITED:
        plain = dict(moe.router.items())
        moe.router = GroupLimitedRouter.params().set(
            **plain, expert_groups=groups, groups_per_token=chosen
        )
    task.decoder.set(dense_first=dense_layers(config), moe_every=1, moe=moe)
    return task


def _v2_config(task: Params) -> dict[str, Any]:
    router = task.decoder.moe.router
    return {
        **_latent_config(task),
        **sigmoid_config(task.decoder),
        "topk_method": _LIMITED if router.cls is GroupLimitedRouter else _GREEDY,
        "aux_loss_alpha": router.auxiliary_loss_weight,
    }


V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    table=_TABLE,
    read_task=_v2_task,
    config_of=_v2_config,
    defaults=_DEFAULTS,
    aliases={"num_experts": "n_routed_experts"},
)
V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    table=_TABLE,
    read_task=_v3_task,
    config_of=_v3_config,
    defaults=_V3_DEFAULTS,
    aliases=EXPERT_ALIASES,
    read_left_out=extra_layers,
)


def _v32_task(config: PublishedConfig) -> Params:
    config.expect("rope_interleave", True)
    config.expect("mlp_bias", False)
    task = _v3_task(config)
    attention = IndexedAttention.params()
    for name, value in task.decoder.layer.self_attention.items():
        attention.set(**{name: value})
    task.decoder.layer.self_attention = attention.set(
        rotary_pairs=NEIGHBORS,
        index_heads=config.get("index_n_heads"),
        index_dim=config.get("index_head_dim"),
        index_topk=config.get("index_topk"),
    )
    dense, layers = task.decoder.dense_first, task.decoder.num_layers
    types = ["dense"] * dense + ["sparse"] * (layers - dense)
    config.expect("mlp_layer_types", types)
    config.expect("layer_types", ["indexed_attention"] * layers)
    return task


def _v32_config(task: Params) -> dict[str, Any]:
    attention, config = task.decoder.layer.self_attention, _v3_config(task)
    del config["rope_interleave"]
    return {
        **config,
        "index_head_dim": attention.index_dim,
        "index_n_heads": attention.index_heads,
        "index_topk": attention.index_topk,
    }


# Sparse attention (arXiv 2512.02556): an indexer chooses the tokens that each token attends to.
V32 = Family(
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    table=(*_TABLE, *_INDEXER),
    read_task=_v32_task,
    config_of=_v32_config,
    defaults=_V32_DEFAULTS,
    aliases={"num_local_experts": "n_routed_experts"},
    read_left_out=extra_layers,
)
# Its config names the classes of DeepSeek-V3.
KIMI_K2 = dataclasses.replace(V3, model_type="kimi_k2")
