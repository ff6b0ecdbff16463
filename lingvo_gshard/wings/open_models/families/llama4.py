"""The text models of Llama 4: one expert of each token, and layers without rotations.

https://ai.meta.com/blog/llama-4-multimodal-intelligence
"""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Params
from lingvo_gshard.layers import RMSNorm, is_expert_layer
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import family
from lingvo_gshard.wings.open_models.families.decoder import USUAL, decoder
from lingvo_gshard.wings.open_models.families.experts import dropless_experts
from lingvo_gshard.wings.published_layers.rotary_pairs import NEIGHBORS
from lingvo_gshard.wings.published_layers.routers import SigmoidRouter

_CHUNKED = "chunked_attention"
_PLAIN_CHUNKED = f"plain {_CHUNKED}"


def _attentions(config: PublishedConfig, attention: Params) -> dict[str, Params]:
    """Returns Params by type of attention: rotated or plain, in chunks or over whole texts."""
    attention.rotary_pairs = NEIGHBORS
    rotated, plain = attention.copy(), attention.copy().set(rotary_fraction=0.0)
    if config.get("use_qk_norm", False):
        norm = RMSNorm.params().set(epsilon=config.get("rms_norm_eps", kind=float), has_scale=False)
        rotated.set(qk_norm=True, normalizes_rotated=True, query_key_norm=norm)
    floor, scale = config.get("floor_scale"), config.get("attn_scale", kind=float)
    if config.get("attn_temperature_tuning", False, object):
        plain.set(temperature_floor=floor, temperature_scale=float(scale))
    chunk = config.get("attention_chunk_size", 0)
    return {
        f"{'rotated' if each is rotated else 'plain'} {kind}": each.copy().set(
            chunk=size, temperature_floor=0 if size else each.temperature_floor
        )
        for each in (rotated, plain)
        for kind, size in ((_CHUNKED, chunk), (family.FULL, 0))
    }


def _kinds(config: PublishedConfig) -> list[str]:
    """Returns whether each layer rotates, and the type of its attention.

    Raises:
      UserError: a list has the wrong length, or a type of attention is unknown.
    """
    layers, interval = config.get("num_hidden_layers"), config.get("no_rope_layer_interval")
    usual = [(index + 1) % interval != 0 for index in range(layers)]
    found = usual
    if config.get("no_rope_layers", [], list):
        found = family.types_of_layers(config, usual, "no_rope_layers", may_be_longer=True)
    types = family.types_of_layers(
        config, [_CHUNKED if rotates else family.FULL for rotates in found]
    )
    kinds = [f"{'rotated' if r else 'plain'} {t}" for r, t in zip(found, types, strict=True)]
    if config.get("attention_chunk_size", 0) >= config.get("max_position_embeddings"):
        # One chunk has all positions. Rotated layers keep it for an export.
        kinds = [f"plain {family.FULL}" if kind == _PLAIN_CHUNKED else kind for kind in kinds]
    if _PLAIN_CHUNKED in kinds:
        beside = f"layer_types of {_CHUNKED!r} where no_rope_layers says that no key rotates"
        config.expect("attn_temperature_tuning", False, 0, beside=beside)
    return kinds


def _read_experts(config: PublishedConfig, task: Params) -> None:
    """Sets the experts of a decoder, in every n-th layer, and the size of its other layers."""
    decoder = task.decoder
    hidden_dim, every = config.get("intermediate_size"), config.get("interleave_moe_layer_step")
    router = SigmoidRouter.params().set(k=1, normalize=False, use_selection_bias=False)
    moe = dropless_experts(router, config.get("num_local_experts"), hidden_dim)
    moe.set(shared_hidden_dim=hidden_dim, gates_inputs=True)
    decoder.set(hidden_dim=config.get("intermediate_size_mlp"), moe_every=every, moe=moe)
    usual = [index for index in range(decoder.num_layers) if is_expert_layer(decoder, index)]
    config.expect("moe_layers", usual)
    family.run_in_periods(decoder)


def _layers_config(task: Params) -> dict[str, Any]:
    decoder, pattern = task.decoder, family.pattern_of(task.decoder)
    layers = family.attention_of_layers(decoder)
    warm = next((each for each in pattern if each.temperature_floor), None)
    tuned = {}
    if warm:
        tuned = {"floor_scale": warm.temperature_floor, "attn_scale": warm.temperature_scale}
    return {
        "use_qk_norm": family.rotating(decoder).qk_norm,
        "no_rope_layers": [int(bool(each.rotary_fraction)) for each in layers],
        "layer_types": [_CHUNKED if each.chunk else family.FULL for each in layers],
        "attention_chunk_size": max(each.chunk for each in pattern) or None,
        "attn_temperature_tuning": warm is not None,
        **tuned,
    }


def _experts_config(task: Params) -> dict[str, Any]:
    decoder, moe = task.decoder, task.decoder.moe
    return {
        "interleave_moe_layer_step": decoder.moe_every,
        "intermediate_size": moe.hidden_dim,
        "intermediate_size_mlp": decoder.hidden_dim,
        "num_local_experts": moe.num_experts,
    }


FAMILY = decoder(
    "llama4_text",
    (
        *USUAL,
        family.BIASES,
        family.layered(_kinds, _attentions, _layers_config),
        family.Part(_read_experts, _experts_config),
    ),
)
