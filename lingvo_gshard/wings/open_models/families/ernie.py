"""ERNIE 4.5, dense and with experts (https://github.com/PaddlePaddle/ERNIE, technical report)."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.layers.stacks.transformer import is_expert_layer
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.decoder import (
    DECODER,
    DECODER_DEFAULTS,
    decoder_config,
    decoder_task,
    layer_row,
)
from lingvo_gshard.wings.open_models.families.experts import ExpertKeys, expert_rows, shared_rows
from lingvo_gshard.wings.open_models.families.family import Family, Setting
from lingvo_gshard.wings.published_layers.rotary_pairs import NEIGHBORS
from lingvo_gshard.wings.published_layers.routers import BiasedSoftmaxRouter

# Published with a dimension of size 1 before the experts.
_SELECTION_BIAS = layer_row(
    "mlp.moe_statics.e_score_correction_bias",
    "feed_forward.router.selection_bias",
    "gE->E",
    choose=(("g", 0, 1),),
)
_BIASES = Setting(
    "use_bias",
    ("attention.use_bias", "attention.use_output_bias", "decoder.layer.feed_forward.use_bias"),
    False,
)
_KEYS = ExpertKeys("moe_num_experts", "moe_k", coefficient=0.0)
_DEFAULTS = DECODER_DEFAULTS | {
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 131072,
    "num_attention_heads": 16,
    "num_hidden_layers": 18,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
    "use_bias": False,
    "vocab_size": 103424,
}
del _DEFAULTS["attention_dropout"]
_EXPERTS_DEFAULTS = {key: value for key, value in _DEFAULTS.items() if key != "head_dim"} | {
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_norm_min": 1e-12,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "router_aux_loss_coef": 0.001,
}


def _task(config: PublishedConfig) -> Params:
    task = decoder_task(config, _BIASES)
    task.decoder.layer.self_attention.rotary_pairs = NEIGHBORS
    return task


def _config(task: Params) -> dict[str, Any]:
    return decoder_config(task, _BIASES)


def _experts_task(config: PublishedConfig) -> Params:
    task = _task(config)
    # Gates are divided by their sum, which is larger.
    config.expect("moe_norm_min", 1e-12)
    config.expect("use_bias", False)
    _set_expert_layers(config, task.decoder)
    moe = _KEYS.read(config, task.decoder, BiasedSoftmaxRouter.params())
    moe.shared_hidden_dim = moe.hidden_dim * config.get("moe_num_shared_experts", 0)
    return task


def _set_expert_layers(config: PublishedConfig, decoder: Params) -> None:
    """Sets which layers of a decoder have experts.

    Raises:
      UserError: layers after the last one with experts would have none, or none has any.
    """
    layers, every = decoder.num_layers, config.get("moe_layer_interval")
    start = config.get("moe_layer_start_index", 0, least=0)
    end = config.get("moe_layer_end_index", -1)
    has_experts = [
        (index + 1) % every == 0 and start <= index <= (layers - 1 if end == -1 else end)
        for index in range(layers)
    ]
    first = next((index for index, has in enumerate(has_experts) if has), 0)
    # Counted from the layer after the dense ones.
    decoder.set(dense_first=max(first - every + 1, 0), moe_every=every)
    if [is_expert_layer(decoder, index) for index in range(layers)] != has_experts:
        raise UserError(
            f"{config.where}: moe_layer_start_index={start}, moe_layer_end_index={end} and "
            f"moe_layer_interval={every} of {layers} layers is not supported; experts in every "
            "layer of the interval up to the last one were expected"
        )


def _experts_config(task: Params) -> dict[str, Any]:
    decoder, moe = task.decoder, task.decoder.moe
    first = next(i for i in range(decoder.num_layers) if is_expert_layer(decoder, i))
    return {
        **_config(task),
        "moe_layer_interval": decoder.moe_every,
        "moe_layer_start_index": first,
        "moe_num_shared_experts": moe.shared_hidden_dim // moe.hidden_dim,
        **_KEYS.config(decoder),
    }


DENSE = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    table=DECODER,
    read_task=_task,
    config_of=_config,
    defaults=_DEFAULTS,
)
EXPERTS = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    table=(*DECODER, *expert_rows("mlp"), *shared_rows("mlp.shared_experts"), _SELECTION_BIAS),
    read_task=_experts_task,
    config_of=_experts_config,
    defaults=_EXPERTS_DEFAULTS,
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
)
