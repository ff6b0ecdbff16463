"""The common part of Marian, M2M-100 and NLLB-MoE: fairseq's layers with biases everywhere."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params
from lingvo_gshard.layers import LayerNorm
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.family import given_positions
from lingvo_gshard.wings.open_models.families.translation import common

# PyTorch's default, which no config has.
_EPSILON = 1e-5
_SIDES = ("encoder", "decoder")


def fairseq_task(config: PublishedConfig) -> Params:
    """Returns an encoder-decoder whose norms stand before the sublayers."""
    for side in _SIDES:
        config.get(f"{side}_layerdrop", 0.0)
    rate = config.get("dropout", 0.0)
    encoder, decoder = common.stacks_of(
        [config.get(f"{side}_layers") for side in _SIDES],
        input_dropout_rate=rate,
        residual_dropout_rate=rate,
        attention_dropout_rate=config.get("attention_dropout", 0.0),
    )
    # Dropped in training only, and within the feed-forward layer.
    config.get("activation_dropout", 0.0)
    name = config.get("activation_function", kind=str)
    activation = common.activation_of(config, "activation_function", name)
    for side, stack in zip(_SIDES, (encoder, decoder), strict=True):
        stack.set(
            num_heads=config.get(f"{side}_attention_heads"),
            hidden_dim=config.get(f"{side}_ffn_dim"),
        )
        stack.layer.norm = LayerNorm.params().set(epsilon=_EPSILON)
        for attention in (stack.layer.self_attention, stack.layer.cross_attention):
            attention.set(use_bias=True, use_output_bias=True)
        stack.layer.feed_forward.set(activation=activation, use_bias=True)
    task = common.task_of(config, encoder, decoder)
    task.positions.max_length = config.get("max_position_embeddings")
    # 0 stands for the square root of the model dimension.
    return task.set(embedding_scale=0.0 if config.get("scale_embedding", False) else 1.0)


def fairseq_config(task: Params) -> dict[str, Any]:
    """Returns what `fairseq_task` reads, from the Params of a task."""
    values: dict[str, Any] = {
        "vocab_size": task.target_vocabulary_size,
        "d_model": task.model_dim,
        "max_position_embeddings": task.positions.max_length,
        "scale_embedding": task.embedding_scale in (0.0, task.model_dim**0.5),
        "dropout": task.encoder.residual_dropout_rate,
        "attention_dropout": task.encoder.attention_dropout_rate,
        "activation_function": common.published_activation(
            task.encoder.layer.feed_forward.activation
        ),
    }
    for side in _SIDES:
        stack = task.get(side)
        values |= {
            f"{side}_layers": stack.num_layers,
            f"{side}_attention_heads": stack.num_heads,
            f"{side}_ffn_dim": stack.hidden_dim,
        }
    return values


# Arguments of `Family` that all of fairseq's have alike.
FAIRSEQ: dict[str, Any] = {"input_of": common.translation_input, "read_positions": given_positions}
