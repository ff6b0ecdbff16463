"""The common part of the families of decoder-only language models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lingvo_gshard.core import Params
from lingvo_gshard.layers import RMSNorm, TransformerStack
from lingvo_gshard.tasks import LanguageModelTask
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.family import SILU, Family, Part, always, rotating
from lingvo_gshard.wings.open_models.families.rope import ROPE
from lingvo_gshard.wings.published_layers.heads_norms import HeadsRMSNorm
from lingvo_gshard.wings.published_layers.published_attention import PublishedAttention
from lingvo_gshard.wings.repeat.loop import Repeat


def decoder(
    model_type: str,
    parts: Sequence[Part],
    epsilon: str = "rms_norm_eps",
    hidden: str = "intermediate_size",
    layers: Callable[[PublishedConfig], int] = lambda config: config.get("num_hidden_layers"),
    **options: Any,
) -> Family:
    """Returns a family of language models with RMSNorm, SwiGLU and grouped queries.

    Args:
      model_type: see `Family`.
      parts: all that changes these layers, in the order of reading.
      epsilon: the key that has the epsilon of the norms.
      hidden: the key that has the size of H.
      layers: returns the number of layers.
      **options: other attributes of `Family`.
    """

    def read_task(config: PublishedConfig) -> Params:
        task = _plain_task(config, epsilon, hidden, layers(config))
        for part in parts:
            part.read(config, task)
        return task

    def config_of(task: Params) -> dict[str, Any]:
        values = _plain_config(task, epsilon)
        for part in parts:
            values |= part.values(task)
        return values

    return Family(model_type, read_task, config_of, **options)


def _plain_task(config: PublishedConfig, epsilon: str, hidden: str, layers: int) -> Params:
    """Returns the task of a `decoder` without parts."""
    model_dim, heads = config.get("hidden_size"), config.get("num_attention_heads")
    decoder = TransformerStack.params().set(
        is_causal=True,
        num_layers=layers,
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
