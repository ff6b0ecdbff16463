"""The common part of the families of decoder-only language models."""

from __future__ import annotations

import dataclasses
from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.norm import RMSNorm
from lingvo_gshard.layers.stacks.loop import Repeat
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.families.family import rotating
from lingvo_gshard.open_models.families.rope import rope_config, set_rope
from lingvo_gshard.open_models.table import TensorPattern
from lingvo_gshard.tasks.language_model import LanguageModelTask

EMBEDDINGS = (
    TensorPattern("model.embed_tokens.weight", "embedding.table", "VM->VM"),
    TensorPattern("lm_head.weight", "softmax.w", "VM->MV"),
    TensorPattern("model.norm.weight", "decoder.final_norm.scale", "M->M"),
)
ATTENTION = (
    TensorPattern(
        "model.layers.{layer}.self_attn.q_proj.weight",
        "decoder.{layer}.self_attention.w_query",
        "(ND)M->MND",
    ),
    TensorPattern(
        "model.layers.{layer}.self_attn.k_proj.weight",
        "decoder.{layer}.self_attention.w_key",
        "(ND)M->MND",
    ),
    TensorPattern(
        "model.layers.{layer}.self_attn.v_proj.weight",
        "decoder.{layer}.self_attention.w_value",
        "(ND)M->MND",
    ),
    TensorPattern(
        "model.layers.{layer}.self_attn.o_proj.weight",
        "decoder.{layer}.self_attention.w_out",
        "M(ND)->NDM",
    ),
)
ATTENTION_BIASES = (
    *(
        TensorPattern(
            f"model.layers.{{layer}}.self_attn.{published}_proj.bias",
            f"decoder.{{layer}}.self_attention.b_{ours}",
            "(ND)->ND",
        )
        for published, ours in (("q", "query"), ("k", "key"), ("v", "value"))
    ),
    TensorPattern(
        "model.layers.{layer}.self_attn.o_proj.bias", "decoder.{layer}.self_attention.b_out", "M->M"
    ),
)
NORMS = (
    TensorPattern(
        "model.layers.{layer}.input_layernorm.weight",
        "decoder.{layer}.self_attention_norm.scale",
        "M->M",
    ),
    TensorPattern(
        "model.layers.{layer}.post_attention_layernorm.weight",
        "decoder.{layer}.feed_forward_norm.scale",
        "M->M",
    ),
)
HEAD_NORMS = (
    TensorPattern(
        "model.layers.{layer}.self_attn.q_norm.weight",
        "decoder.{layer}.self_attention.query_norm.scale",
        "M->M",
    ),
    TensorPattern(
        "model.layers.{layer}.self_attn.k_norm.weight",
        "decoder.{layer}.self_attention.key_norm.scale",
        "M->M",
    ),
)
# Norms over all heads together.
HEADS_NORMS = tuple(dataclasses.replace(row, arrangement="(ND)->ND") for row in HEAD_NORMS)
# Norms at the outputs of sublayers, as OLMo 2 has them.
OUTPUT_NORMS = tuple(
    TensorPattern(
        f"model.layers.{{layer}}.post_{published}_layernorm.weight",
        f"decoder.{{layer}}.{ours}_output_norm.scale",
        "M->M",
    )
    for published, ours in (("attention", "self_attention"), ("feedforward", "feed_forward"))
)
# The biases of layer norms.
NORM_BIASES = tuple(
    TensorPattern(
        row.published.replace(".weight", ".bias"), row.weight.replace(".scale", ".bias"), "M->M"
    )
    for row in (*NORMS, EMBEDDINGS[-1])
)
# One tensor for queries, keys and values, and one for the gate and its factor, as in Phi-3.
FUSED_ATTENTION = (
    *(
        TensorPattern(
            "model.layers.{layer}.self_attn.qkv_proj.weight",
            f"decoder.{{layer}}.self_attention.w_{name}",
            "(ND)M->MND",
            joined="N",
        )
        for name in ("query", "key", "value")
    ),
    ATTENTION[-1],
)
FUSED_FEED_FORWARD = (
    *(
        TensorPattern(
            "model.layers.{layer}.mlp.gate_up_proj.weight",
            f"decoder.{{layer}}.feed_forward.w_{name}",
            "HM->MH",
            joined="H",
        )
        for name in ("in", "factor")
    ),
    TensorPattern(
        "model.layers.{layer}.mlp.down_proj.weight", "decoder.{layer}.feed_forward.w_out", "MH->HM"
    ),
)
FEED_FORWARD_BIASES = (
    TensorPattern(
        "model.layers.{layer}.mlp.gate_proj.bias", "decoder.{layer}.feed_forward.b_in", "H->H"
    ),
    TensorPattern(
        "model.layers.{layer}.mlp.up_proj.bias", "decoder.{layer}.feed_forward.b_factor", "H->H"
    ),
    TensorPattern(
        "model.layers.{layer}.mlp.down_proj.bias", "decoder.{layer}.feed_forward.b_out", "M->M"
    ),
)
FEED_FORWARD = (
    TensorPattern(
        "model.layers.{layer}.mlp.gate_proj.weight", "decoder.{layer}.feed_forward.w_in", "HM->MH"
    ),
    TensorPattern(
        "model.layers.{layer}.mlp.up_proj.weight", "decoder.{layer}.feed_forward.w_factor", "HM->MH"
    ),
    TensorPattern(
        "model.layers.{layer}.mlp.down_proj.weight", "decoder.{layer}.feed_forward.w_out", "MH->HM"
    ),
)
# Defaults of most classes of transformers for the keys that `decoder_task` reads.
DECODER_DEFAULTS: dict[str, Any] = {
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def decoder_task(config: PublishedConfig, hidden: str = "intermediate_size") -> Params:
    """Returns a language model with rotary positions, RMSNorm, SwiGLU and grouped queries.

    Args:
      config: the config.
      hidden: the key that has the size of H.
    """
    config.expect("hidden_act", "silu")
    task = plain_task(config, hidden=hidden)
    set_rope(config, task.decoder.layer.self_attention, config.rope())
    return task


def plain_task(
    config: PublishedConfig, epsilon: str = "rms_norm_eps", hidden: str = "intermediate_size"
) -> Params:
    """Returns `decoder_task` without rotations, whatever the activation that the config names.

    Args:
      config: the config.
      epsilon: the key that has the epsilon of the norms.
      hidden: the key that has the size of H.
    """
    model_dim, heads = config.get("hidden_size"), config.get("num_attention_heads")
    decoder = TransformerStack.params().set(
        is_causal=True,
        num_layers=config.get("num_hidden_layers"),
        num_heads=heads,
        hidden_dim=config.get(hidden),
        moe_every=0,
        attention_dropout_rate=config.get("attention_dropout", 0.0),
        execution=Repeat.params(),
    )
    decoder.layer.norm = RMSNorm.params().set(epsilon=config.get(epsilon, kind=float))
    decoder.layer.self_attention.set(
        head_dim=config.get("head_dim", model_dim // heads, least=1),
        num_key_value_heads=config.get("num_key_value_heads", heads, least=1),
    )
    decoder.layer.feed_forward.set(activation="swiglu", use_bias=False)
    return LanguageModelTask.params().set(
        model_dim=model_dim,
        vocabulary_size=config.get("vocab_size"),
        decoder=decoder,
        add_positions=False,
        embedding_scale=1.0,
        tie_softmax=config.get("tie_word_embeddings", False),
    )


def decoder_config(task: Params) -> dict[str, Any]:
    """Makes the config values that `decoder_task` reads from the Params of a task."""
    attention = rotating(task.decoder)
    return {**plain_config(task), "hidden_act": "silu", **rope_config(attention)}


def plain_config(task: Params, epsilon: str = "rms_norm_eps") -> dict[str, Any]:
    """Returns what `plain_task` reads, from the Params of a task.

    Args:
      task: Params of the task.
      epsilon: the key that has the epsilon of the norms.
    """
    decoder = task.decoder
    attention = rotating(decoder)
    has_heads = "num_key_value_heads" in attention
    key_value_heads = attention.num_key_value_heads if has_heads else 0
    head_dim = attention.head_dim if has_heads else 0
    return {
        "vocab_size": task.vocabulary_size,
        "hidden_size": task.model_dim,
        "intermediate_size": decoder.layer.feed_forward.get("hidden_dim") or decoder.hidden_dim,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": key_value_heads or decoder.num_heads,
        "head_dim": head_dim or task.model_dim // decoder.num_heads,
        epsilon: decoder.layer.norm.epsilon,
        "attention_dropout": decoder.attention_dropout_rate,
        "tie_word_embeddings": task.tie_softmax,
    }
