"""Draws configs with random changes of their keys."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.parity.case import Case
from benchmarks.parity.cases import CASES
from lingvo_gshard.wings.open_models.families import FAMILIES

# Keys of published files that no class reads.
_UNKNOWN = ("im_start_id", "pad_id", "pool_type", "full_attn_mod", "use_cla", "scoring_func")
_LISTED = {
    "layer_types": (
        ("full_attention", "sliding_attention"),
        ("full_attention", "linear_attention"),
        ("full_attention", "chunked_attention"),
    ),
    "mlp_layer_types": (("dense", "sparse"),),
    "indexer_types": (("full", "shared"),),
    "no_rope_layers": ((0, 1),),
}
_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish", "tanh")
_CHOICES: dict[str, Sequence[Any]] = {
    **dict.fromkeys(
        ("hidden_act", "hidden_activation", "activation_function", "dense_act_fn"), _ACTIVATIONS
    ),
    "feed_forward_proj": ("relu", "gelu", "gated-gelu", "gated-silu", "gated-relu", "silu"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "router_dtype": ("float32", "float16", "bfloat16"),
    "second_expert_policy": ("all", "sampling", "random"),
    "use_bidirectional_attention": (None, "vision", "all", True, False),
    "index_topk_pattern": ("FSS", "FFF", "FFFF", None),
    "per_layer_config": ({}, None),
    "moe_layers": ([], [0], [1], [0, 1], [1, 3], [0, 1, 2]),
    "mlp_only_layers": ([], [0], [1], [0, 1]),
    **dict.fromkeys(("rope_theta", "compress_rope_theta"), (500.0, 100, 1e6)),
    "partial_rotary_factor": (0.5, 0.25, 0.75, 1.0, None),
    "original_max_position_embeddings": (8, 16, 64, None),
    "scoring_func": ("sigmoid", "softmax"),
    "max_position_embeddings": (8, 16, 40, 128),
    **dict.fromkeys(("hidden_size", "d_model"), (16, 32, 64, 96)),
    **dict.fromkeys(("is_gated_act", "scale_decoder_outputs"), (True, False)),
    **dict.fromkeys(("n_positions", "decoder_vocab_size"), (320, 512)),
    **dict.fromkeys(
        (
            "full_attention_interval",
            "index_topk_freq",
            "num_global_key_value_heads",
            "rotary_dim",
            "sliding_window_pattern",
            "sliding_window_size",
            "top_k_experts",
        ),
        (1, 2, 4, 8),
    ),
    "clip_qkv": (0.5, 2, 8.0),
    "global_head_dim": (8, 16, 24),
    "aux_loss_alpha": (0.0, 0.01),
    # Gates may have a sum above numbers in between.
    "moe_norm_min": (1e-15, 1e-10, 0.9),
}
# A published model tolerates dropped tokens, and ours drops none. Here nobody drops any.
_CHOICES |= {"expert_capacity": (64, 128), "moe_eval_capacity_token_fraction": (1.0, 2)}
# Files have one form of these keys.
_ROTARY = {"rope_parameters", "rope_scaling", "rope_theta"}
# Parts of the names of keys that have no 0.
_SIZES = ("dim", "heads", "rank", "size", "vocab")
# Numbers of this size count something in a published model, and too much for a small one.
_LARGE = 400
_SMALL = (1, 2, 3, 4, 6, 8, 12, 16, 24)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A config of a case, and random changes of its keys.

    Attributes:
      family: the `model_type`.
      values: the values of the case's config.
      changes: the keys that differ, and their values.
    """

    family: str
    values: Mapping[str, Any]
    changes: Mapping[str, Any]


def draw(family: str, seed: str) -> Variant:
    """Returns a variant of a family, with one to three changes.

    Changes are of keys with an effect in the family's class, of keys of other classes, or of rotary
    parameters. The same seed returns the same variant.
    """
    own, from_ = FAMILIES[family].class_keys, random.Random(f"{family} {seed}")
    case = from_.choice(_cases(family))
    values = {**case.values, "model_type": family}
    if "sliding_window" in own:
        # The window of published models is longer than the texts here.
        values.setdefault("sliding_window", 6)
    changes: dict[str, Any] = {}
    for _ in range(from_.randint(1, 3)):
        kind = from_.random()
        if kind < 0.12 and "rope_theta" in own and not _ROTARY & changes.keys():
            changes |= _rotary(from_, values)
        elif kind < 0.8:
            taken = _ROTARY if _ROTARY & changes.keys() else set()
            key = from_.choice(sorted(own.keys() - {"model_type", "rope_parameters"} - taken))
            changes[key] = _value(from_, key, values | changes, own[key])
        else:
            strange = sorted({*_all_keys(), *_UNKNOWN} - own.keys())
            key = from_.choice(strange)
            changes[key] = _value(from_, key, values | changes, None)
    return Variant(family, values, changes)


def _cases(family: str) -> list[Case]:
    """Returns the cases of a family, or of the family whose class computes it."""
    names = (family, FAMILIES[family].keys.same)
    return [case for case in CASES if case.model_type in names]


@functools.cache
def _all_keys() -> Mapping[str, Any]:
    """Returns key of any class -> the first value that some class has where it is missing."""
    found: dict[str, Any] = {}
    for family in FAMILIES.values():
        for key, value in family.class_keys.items():
            if found.get(key) is None:
                found[key] = value
    del found["model_type"], found["rope_parameters"], found["rope_scaling"]
    return found


def _value(from_: random.Random, key: str, values: Mapping[str, Any], default: Any) -> Any:
    """Returns a value of a key that its class may accept.

    Args:
      from_: the random numbers.
      key: the key.
      values: the values of the config.
      default: the value that a missing key has.
    """
    layers = values.get("num_hidden_layers") or values.get("num_layers") or 3
    if from_.random() < 0.06 and key != "rope_theta":
        return None
    if key in _LISTED:
        kinds = from_.choice(_LISTED[key])
        return [from_.choice(kinds) for _ in range(layers)]
    if key == "rope_scaling":
        return _scaling(from_)
    if (
        key == "max_position_embeddings"
        and "rope_theta" not in FAMILIES[values["model_type"]].class_keys
    ):
        return from_.choice((32, 40, 128))
    if (values["model_type"], key) == ("phimoe", "original_max_position_embeddings"):
        # Texts beyond it differ by intent.
        return from_.choice((64, None))
    if key in _CHOICES:
        return from_.choice(_CHOICES[key])
    usual = values.get(key, default)
    usual = _all_keys().get(key) if usual is None else usual
    if isinstance(usual, bool):
        return from_.random() < 0.2 if usual else from_.random() < 0.8
    if isinstance(usual, float):
        if "drop" in key:
            return from_.choice((0, 0.0, 0.1, 0.5))
        small = (0.1, 1e-3) if 0 < usual < 0.01 else (0.0, 1.0, 1)
        return from_.choice((usual * 2, usual / 2, *small))
    if isinstance(usual, int):
        near = _SMALL if usual > _LARGE else (usual * 2, usual // 2, usual + 1, usual - 1)
        found = from_.choice((*near, *near, *_SMALL[:4], 0))
        if "head_dim" in key:
            # Rotations turn pairs. In the smallest heads, wrong ones pass for right ones.
            return max(found + found % 2, 4)
        return found or 2 * any(part in key for part in _SIZES)
    return from_.choice((True, False, 0.5, 2, 8, "none", []))


def _rotary(from_: random.Random, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns rotary keys, in one of the forms that files have."""
    form, base = from_.random(), from_.choice((100.0, 500.0, 10000.0))
    given = values.get("rope_parameters") or {}
    if form < 0.3:
        return {"rope_scaling": _scaling(from_), "rope_theta": base}
    if "full_attention" in given:
        kind = from_.choice(sorted(given))
        own = {"rope_theta": base, **_scaling(from_)}
        return {"rope_parameters": {**given, kind: own}}
    # Some classes need parameters of their own.
    kept = {k: v for k, v in given.items() if k == "llama_4_scaling_beta"}
    return {"rope_parameters": {"rope_theta": base, **kept, **_scaling(from_)}}


def _scaling(from_: random.Random) -> dict[str, Any]:
    """Returns the parameters of a rotary scaling."""
    kind = from_.choice(("default", "linear", "dynamic", "yarn", "llama3"))
    found: dict[str, Any] = {from_.choice(("rope_type", "rope_type", "type")): kind}
    if kind != "default":
        found["factor"] = from_.choice((2.0, 4.0, 8))
    if kind == "llama3":
        low = from_.choice((1.0, 2.0))
        found |= {"low_freq_factor": low, "high_freq_factor": 4.0}
    if kind in ("llama3", "yarn") or from_.random() < 0.1:
        found["original_max_position_embeddings"] = from_.choice((8, 16))
    optional = {
        "partial_rotary_factor": (0.5, 0.25, 1.0),
        **(
            {
                "beta_fast": (16, 32.0, 4.0),
                "beta_slow": (1.0, 2),
                "mscale": (1.0, 0.7),
                "mscale_all_dim": (1.0, 0.5, 0),
                "attention_factor": (0.8, None),
                "truncate": (True, False),
            }
            if kind == "yarn"
            else {}
        ),
    }
    for key, choices in optional.items():
        if from_.random() < 0.25:
            found[key] = from_.choice(choices)
    return found
