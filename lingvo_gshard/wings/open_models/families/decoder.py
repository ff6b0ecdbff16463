"""The common part of the families of decoder-only language models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core import Params
from lingvo_gshard.layers import RMSNorm, TransformerStack
from lingvo_gshard.tasks import LanguageModelTask
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.family import SILU, Family, Part, always, rotating
from lingvo_gshard.wings.open_models.families.rope import ROPE
from lingvo_gshard.wings.open_models.table import Table, TensorPattern
from lingvo_gshard.wings.published_layers.heads_norms import HeadsRMSNorm
from lingvo_gshard.wings.published_layers.published_attention import PublishedAttention
from lingvo_gshard.wings.repeat.loop import Repeat

_LAYER, _OURS = "model.layers.{layer}", "decoder.{layer}"


def layer_row(published: str, ours: str, arrangement: str, **options: Any) -> TensorPattern:
    """Returns the row of a tensor of a layer, whose names are those within the layer.

    Args:
      published: name of the tensor.
      ours: path of the weight.
      arrangement: see `TensorPattern`.
      **options: other fields of `TensorPattern`.
    """
    return TensorPattern(f"{_LAYER}.{published}", f"{_OURS}.{ours}", arrangement, **options)


EMBEDDINGS = (
    TensorPattern("model.embed_tokens.weight", "embedding.table", "VM->VM"),
    TensorPattern("lm_head.weight", "softmax.w", "VM->MV"),
    TensorPattern("model.norm.weight", "decoder.final_norm.scale", "M->M"),
)
ATTENTION = (
    layer_row("self_attn.q_proj.weight", "self_attention.w_query", "(ND)M->MND"),
    layer_row("self_attn.k_proj.weight", "self_attention.w_key", "(ND)M->MND"),
    layer_row("self_attn.v_proj.weight", "self_attention.w_value", "(ND)M->MND"),
    layer_row("self_attn.o_proj.weight", "self_attention.w_out", "M(ND)->NDM"),
)
ATTENTION_BIASES = (
    layer_row("self_attn.q_proj.bias", "self_attention.b_query", "(ND)->ND"),
    layer_row("self_attn.k_proj.bias", "self_attention.b_key", "(ND)->ND"),
    layer_row("self_attn.v_proj.bias", "self_attention.b_value", "(ND)->ND"),
    layer_row("self_attn.o_proj.bias", "self_attention.b_out", "M->M"),
)
NORMS = (
    layer_row("input_layernorm.weight", "self_attention_norm.scale", "M->M"),
    layer_row("post_attention_layernorm.weight", "feed_forward_norm.scale", "M->M"),
)
HEAD_NORMS = (
    layer_row("self_attn.q_norm.weight", "self_attention.query_norm.scale", "M->M"),
    layer_row("self_attn.k_norm.weight", "self_attention.key_norm.scale", "M->M"),
)
# Norms over all heads together.
HEADS_NORMS = tuple(dataclasses.replace(row, arrangement="(ND)->ND") for row in HEAD_NORMS)
# Norms at the outputs of sublayers, as OLMo 2 has them.
OUTPUT_NORMS = (
    layer_row("post_attention_layernorm.weight", "self_attention_output_norm.scale", "M->M"),
    layer_row("post_feedforward_layernorm.weight", "feed_forward_output_norm.scale", "M->M"),
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
        layer_row("self_attn.qkv_proj.weight", f"self_attention.w_{name}", "(ND)M->MND", joined="N")
        for name in ("query", "key", "value")
    ),
    ATTENTION[-1],
)


def feed_forward_rows(block: str, ours: str = "feed_forward") -> Table:
    """Returns the rows of a feed-forward layer with a gate.

    Args:
      block: published name of the feed-forward layer within its layer.
      ours: path of ours.
    """
    return (
        layer_row(f"{block}.gate_proj.weight", f"{ours}.w_in", "HM->MH"),
        layer_row(f"{block}.up_proj.weight", f"{ours}.w_factor", "HM->MH"),
        layer_row(f"{block}.down_proj.weight", f"{ours}.w_out", "MH->HM"),
    )


def fused_rows(published: str, out: str, ours: str = "feed_forward", experts: str = "") -> Table:
    """Returns the rows of a feed-forward layer whose gate and factor are one tensor.

    Args:
      published: name of this tensor within its layer.
      out: name of the tensor of the output product.
      ours: path of our feed-forward layer.
      experts: the letter of the experts; empty for a layer without experts.
    """
    fused = f"{experts}HM->{experts}MH"
    return (
        layer_row(published, f"{ours}.w_in", fused, joined="H"),
        layer_row(published, f"{ours}.w_factor", fused, joined="H"),
        layer_row(out, f"{ours}.w_out", f"{experts}MH->{experts}HM"),
    )


FEED_FORWARD = feed_forward_rows("mlp")
FEED_FORWARD_BIASES = (
    layer_row("mlp.gate_proj.bias", "feed_forward.b_in", "H->H"),
    layer_row("mlp.up_proj.bias", "feed_forward.b_factor", "H->H"),
    layer_row("mlp.down_proj.bias", "feed_forward.b_out", "M->M"),
)
# The tensors of most decoders. A row applies to the models that have its weight.
DECODER = (
    *EMBEDDINGS,
    *ATTENTION,
    *ATTENTION_BIASES,
    *HEAD_NORMS,
    *HEADS_NORMS,
    *NORMS,
    *FEED_FORWARD,
    *FEED_FORWARD_BIASES,
)


def decoder(
    model_type: str,
    architecture: str,
    parts: Sequence[Part],
    table: Table = DECODER,
    epsilon: str = "rms_norm_eps",
    hidden: str = "intermediate_size",
    **options: Any,
) -> Family:
    """Returns a family of language models with RMSNorm, SwiGLU and grouped queries.

    Args:
      model_type: see `Family`.
      architecture: see `Family`.
      parts: all that changes these layers, in the order of reading.
      table: see `Family`.
      epsilon: the key that has the epsilon of the norms.
      hidden: the key that has the size of H.
      **options: other attributes of `Family`.
    """

    def read_task(config: PublishedConfig) -> Params:
        task = _plain_task(config, epsilon, hidden)
        for part in parts:
            part.read(config, task)
        return task

    def config_of(task: Params) -> dict[str, Any]:
        values = _plain_config(task, epsilon)
        for part in parts:
            values |= part.values(task)
        return values

    return Family(model_type, architecture, table, read_task, config_of, **options)


def _plain_task(config: PublishedConfig, epsilon: str, hidden: str) -> Params:
    """Returns the task of a `decoder` without parts."""
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
    decoder.layer.self_attention = PublishedAttention.params().set(
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


def _plain_config(task: Params, epsilon: str) -> dict[str, Any]:
    """Returns what `_plain_task` reads, from the Params of a task."""
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


def _set_head_norms(config: PublishedConfig, task: Params) -> None:
    del config
    layer = task.decoder.layer
    layer.self_attention.qk_norm = True
    layer.self_attention.query_key_norm.epsilon = layer.norm.epsilon


def _set_heads_norm(config: PublishedConfig, task: Params) -> None:
    del config
    layer = task.decoder.layer
    norm = HeadsRMSNorm.params().set(epsilon=layer.norm.epsilon)
    layer.self_attention.set(qk_norm=True, query_key_norm=norm)


# Most families begin with these parts.
USUAL = (SILU, ROPE)
# Norms stand at the outputs of sublayers.
OUTPUT_POSITION = always({"decoder.layer.norm_position": "output"})
# Norms of queries and keys: of each head alone, or of all heads of a layer together.
NORMS_BY_HEAD, NORMS_OF_HEADS = Part(_set_head_norms), Part(_set_heads_norm)
