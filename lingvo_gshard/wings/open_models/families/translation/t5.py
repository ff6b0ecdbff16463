"""T5 (arXiv 1910.10683) and T5 1.1, with gated activations and a softmax of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.layers import RMSNorm
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.family import Family
from lingvo_gshard.wings.open_models.families.translation import common

# Positions of the texts that T5 was trained on. Relative positions set no limit.
_POSITIONS = 512
_GATED = {"gelu_tanh": "geglu_tanh", "gelu": "geglu", "silu": "swiglu", "relu": "reglu"}


def t5_task(config: PublishedConfig, activation: str, is_scaled: bool, is_tied: bool) -> Params:
    """Returns a T5.

    Args:
      config: the values of a `config.json`.
      activation: our name of the activation.
      is_scaled: whether the decoder's output is divided by sqrt(M) before the softmax.
      is_tied: whether the softmax shares the table.

    Raises:
      UserError: only `num_hidden_layers` says how many layers the encoder has.
    """
    if "num_hidden_layers" in config.values and "num_layers" not in config.values:
        raise UserError(
            f"{config.where} has num_hidden_layers without num_layers, so that encoder and decoder "
            "differ in transformers; name it num_layers"
        )
    layers, rate = config.get("num_layers"), config.get("dropout_rate", 0.0)
    encoder, decoder = common.stacks_of(
        (layers, config.get("num_decoder_layers", layers, least=1)),
        num_heads=config.get("num_heads"),
        hidden_dim=config.get("d_ff"),
        input_dropout_rate=rate,
        residual_dropout_rate=rate,
        attention_dropout_rate=rate,
    )
    buckets = config.get("relative_attention_num_buckets")
    # Each direction of the encoder has half of them.
    config.expect("relative_attention_num_buckets", max(buckets - buckets % 2, 4))
    for stack in (encoder, decoder):
        layer = stack.layer
        layer.norm = RMSNorm.params().set(epsilon=config.get("layer_norm_epsilon", kind=float))
        for attention in (layer.self_attention, layer.cross_attention):
            attention.set(head_dim=config.get("d_kv"), query_scale=1.0)
        layer.feed_forward.set(activation=activation, use_bias=False)
        stack.shared_relative_bias.set(
            buckets=buckets, max_distance=config.get("relative_attention_max_distance")
        )
    task = common.task_of(config, encoder, decoder)
    return task.set(
        add_positions=False,
        embedding_scale=1.0,
        tie_softmax=is_tied,
        logit_scale=task.model_dim**-0.5 if is_scaled else 1.0,
    )


def t5_config(task: Params) -> dict[str, Any]:
    """Returns what `t5_task` reads, from the Params of a task."""
    encoder = task.encoder
    attention, bias = encoder.layer.self_attention, encoder.shared_relative_bias
    return {
        "vocab_size": task.target_vocabulary_size,
        "d_model": task.model_dim,
        "d_kv": attention.head_dim or task.model_dim // encoder.num_heads,
        "d_ff": encoder.hidden_dim,
        "num_layers": encoder.num_layers,
        "num_decoder_layers": task.decoder.num_layers,
        "num_heads": encoder.num_heads,
        "relative_attention_num_buckets": bias.buckets or 32,
        "relative_attention_max_distance": bias.max_distance,
        "dropout_rate": encoder.residual_dropout_rate,
        "layer_norm_epsilon": encoder.layer.norm.epsilon,
    }


def t5_positions(config: PublishedConfig) -> tuple[int, bool]:
    """Returns the positions of T5's training texts, and True since T5 may read longer texts."""
    return config.get("n_positions", _POSITIONS), True


def _umt5_task(config: PublishedConfig) -> Params:
    task = _task(config)
    for stack in (task.encoder, task.decoder):
        shared = stack.shared_relative_bias
        stack.layer.self_attention.set(
            relative_buckets=shared.buckets, relative_max_distance=shared.max_distance
        )
        shared.buckets = 0
    return task


def _umt5_config(task: Params) -> dict[str, Any]:
    attention = task.encoder.layer.self_attention
    return {
        **_config(task),
        "relative_attention_num_buckets": attention.relative_buckets,
        "relative_attention_max_distance": attention.relative_max_distance,
    }


def _task(config: PublishedConfig) -> Params:
    # transformers 5 writes the second key, and always True for the first one.
    is_tied = config.get("tie_word_embeddings", True)
    is_scaled = config.get("scale_decoder_outputs", is_tied)
    return t5_task(config, _activation(config), is_scaled, is_tied=is_tied and is_scaled)


def _mt5_task(config: PublishedConfig) -> Params:
    is_tied = config.get("tie_word_embeddings", True)
    return t5_task(config, _activation(config), is_scaled=False, is_tied=is_tied)


def _activation(config: PublishedConfig) -> str:
    """Returns our name of the activation.

    Raises:
      UserError: it is unknown, or two keys say different things.
    """
    published = config.get("feed_forward_proj", kind=str)
    gate, _, name = published.rpartition("-")
    # The name that T5 1.1 gave it.
    name = "gelu_new" if published == "gated-gelu" else name
    # transformers prefers these keys if a file has them.
    for key, usual in (("dense_act_fn", name), ("is_gated_act", gate == "gated")):
        if key in config.values:
            config.expect(key, usual)
    activation = common.activation_of(config, "feed_forward_proj", name)
    if gate:
        activation = _GATED.get(activation, "") if gate == "gated" else ""
        if not activation:
            raise UserError(
                f"{config.where}: feed_forward_proj is {published!r}, which is not supported; "
                "'relu' or 'gated-gelu' was expected"
            )
    return activation


def _config(task: Params) -> dict[str, Any]:
    activation = task.encoder.layer.feed_forward.activation
    plain = next((plain for plain, gated in _GATED.items() if gated == activation), None)
    known = "gelu" if plain == "gelu_tanh" else common.published_activation(plain or activation)
    name = f"gated-{known}" if plain else known
    return {**t5_config(task), "feed_forward_proj": name, "tie_word_embeddings": task.tie_softmax}


FAMILY = Family(
    model_type="t5",
    read_task=_task,
    config_of=_config,
    input_of=common.translation_input,
    read_positions=t5_positions,
)
# T5 1.1 for 101 languages (arXiv 2010.11934). Its logits are never scaled.
MT5 = dataclasses.replace(FAMILY, model_type="mt5", read_task=_mt5_task)
# mT5 with a bias of relative positions in each layer (arXiv 2304.09151).
UMT5 = dataclasses.replace(FAMILY, model_type="umt5", read_task=_umt5_task, config_of=_umt5_config)
