"""Kimi Linear (arXiv 2510.26692): Kimi Delta Attention and latent attention without positions."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import family
from lingvo_gshard.wings.open_models.families.decoder import decoder
from lingvo_gshard.wings.open_models.families.deepseek.deepseek_v3 import latent_config, read_latent
from lingvo_gshard.wings.open_models.families.experts import scaled_experts
from lingvo_gshard.wings.published_layers.kimi_delta_attention import KimiDeltaAttention

_LENGTH = "model_max_length"
# The object of older keys. They precede the keys of the class, but for the types of layers.
_OLDER = "linear_attn_config"
# Hyperparameter -> key, and key of the object.
_KEYS = {
    "num_heads": ("linear_num_heads", "num_heads"),
    "head_dim": ("linear_head_dim", "head_dim"),
    "convolution_width": ("linear_conv_kernel_dim", "short_conv_kernel_size"),
}
# Type of a layer -> key of the object with the numbers of its layers, from 1.
_NUMBERED = {family.FULL: "full_attn_layers", family.LINEAR: "kda_layers"}


def _older(config: PublishedConfig) -> PublishedConfig:
    """Returns the object of older keys as a config."""
    return PublishedConfig(config.get(_OLDER, {}, dict), f"{config.where}: {_OLDER}")


def _kinds(config: PublishedConfig) -> list[str]:
    """Returns the type of each layer."""
    older, count = _older(config), config.get("num_hidden_layers")
    usual = [family.FULL if index and index % 4 == 0 else family.LINEAR for index in range(count)]
    if all(map(older.is_given, _NUMBERED.values())) and not config.is_given("layer_types"):
        usual = _numbered(older, count)
    return family.types_of_layers(config, usual)


def _numbered(older: PublishedConfig, count: int) -> list[str]:
    """Returns the type of each layer from the numbers of layers of each type.

    Raises:
      UserError: they are not the numbers from 1 to the number of layers.
    """
    found = [(each, kind) for kind, key in _NUMBERED.items() for each in older.get(key, [], list)]
    numbers = [number for number, _ in found]
    if sorted(numbers, key=str) != sorted(range(1, count + 1), key=str):
        raise UserError(
            f"{older.where}: {' and '.join(_NUMBERED.values())} have the numbers {numbers}; "
            f"each number from 1 to num_hidden_layers={count} was expected once"
        )
    return [kind for _, kind in sorted(found)]


def _delta_attention(config: PublishedConfig) -> Params:
    older, kimi = _older(config), KimiDeltaAttention.params()
    for name, (key, short) in _KEYS.items():
        kimi.set(**{name: older.get(short, config.get(key), int, 1)})
    kimi.output_norm.epsilon = config.get("rms_norm_eps", kind=float)
    return kimi


def _read_latent(config: PublishedConfig, task: Params) -> None:
    read_latent(config, task, {"rope_type": "default", "rope_theta": 10000.0})
    task.decoder.layer.self_attention.rotates = False


def _positions(config: PublishedConfig) -> tuple[int, bool]:
    """Returns the positions that the model was made for; the published file's key comes first."""
    own, (usual, may_exceed) = config.get(_LENGTH, 0, object), family.given_positions(config)
    return own if isinstance(own, int) and own > 0 else usual, may_exceed


def _layers_config(task: Params) -> dict[str, Any]:
    layers = family.attention_of_layers(task.decoder)
    usual = KimiDeltaAttention.params().set(num_heads=1, head_dim=1)
    kimi = next((each for each in layers if each.cls is KimiDeltaAttention), usual)
    return {
        "layer_types": [
            family.LINEAR if each.cls is KimiDeltaAttention else family.FULL for each in layers
        ],
        **{key: kimi.get(name) for name, (key, _) in _KEYS.items()},
    }


KIMI_LINEAR = decoder(
    "kimi_linear",
    (
        family.SILU,
        family.Part(_read_latent, latent_config),
        scaled_experts("num_local_experts", by_type=True),
        family.layered(
            _kinds,
            lambda config, attention: {
                family.FULL: attention,
                family.LINEAR: _delta_attention(config),
            },
            _layers_config,
        ),
        family.IN_PERIODS,
    ),
    read_positions=_positions,
    limit=f"{_LENGTH} or max_position_embeddings",
)
