"""What the config classes of transformers make of missing keys, for tests.

    python -m tests.open_models.recorded.defaults

writes defaults.json. It needs the extra `peers`: PyTorch and transformers.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from benchmarks.parity.cases import CASES

FILE = pathlib.Path(__file__).with_suffix(".json")
# Says of a config that transformers refuses it.
REFUSED = "refused"
# Keys of the base class that all classes have: only these may change a model.
_BASE_KEYS = ("pad_token_id",)
# Keys that are not left out one by one, since no family reads them.
UNRECORDED = (
    "bos_token_id",
    "eos_token_id",
    "init_std",
    "initializer_factor",
    "initializer_range",
    "output_router_logits",
    "use_cache",
)
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LAYERS = {"num_hidden_layers": 3}
_NO_TABLES = {"hidden_size_per_layer_input": 0}
# Configs as older versions of transformers and users write them.
WRITTEN: tuple[dict[str, Any], ...] = (
    {"model_type": "llama", "rope_theta": 500.0},
    {"model_type": "llama", "rope_theta": 500.0, "rope_scaling": _YARN},
    {
        "model_type": "llama",
        "rope_theta": 500.0,
        "rope_scaling": _YARN,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    {"model_type": "llama", "rope_parameters": {"rope_theta": 500.0, **_YARN, "beta_slow": 0}},
    {"model_type": "llama", "rope_scaling": {"type": "yarn", "factor": 4.0}},
    {"model_type": "llama", "rope_scaling": {"type": "llama3", "factor": 8.0}},
    {"model_type": "llama", "rope_scaling": {"type": "linear"}},
    {"model_type": "llama", "rope_scaling": _YARN, "original_max_position_embeddings": 32},
    {
        "model_type": "llama",
        "max_position_embeddings": 64,
        "rope_scaling": {
            "type": "dynamic",
            "factor": 2.0,
            "original_max_position_embeddings": 16,
        },
    },
    {"model_type": "mistral"},
    {"model_type": "mixtral", "num_experts": 4},
    {"model_type": "mixtral", "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"model_type": "qwen3_moe", "num_local_experts": 4},
    {"model_type": "olmoe", "num_local_experts": 4},
    {"model_type": "gpt_oss", **_LAYERS, "rope_theta": 500.0},
    {"model_type": "gpt_oss", **_LAYERS, "rope_scaling": _YARN},
    {"model_type": "gpt_oss", **_LAYERS, "layer_types": ["full_attention"] * 3},
    {"model_type": "glm4_moe", "partial_rotary_factor": 0.25},
    {"model_type": "glm4_moe", "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    {"model_type": "deepseek_v3", "num_local_experts": 128},
    {"model_type": "deepseek_v3", "rope_scaling": _YARN | {"mscale_all_dim": 1.0, "mscale": 0.5}},
    {"model_type": "deepseek_v2", "num_experts_per_tok": 2, "num_experts": 8},
    {"model_type": "gemma2", **_LAYERS, "layer_types": ["full_attention"] * 3},
    {"model_type": "gemma4_text", **_LAYERS, **_NO_TABLES},
    {
        "model_type": "gemma4_text",
        **_LAYERS,
        **_NO_TABLES,
        "attention_k_eq_v": True,
        "global_head_dim": 64,
        "num_global_key_value_heads": 2,
    },
    {"model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window_pattern": 2},
    {"model_type": "gemma3_text", "num_hidden_layers": 8, "rope_local_base_freq": 50.0},
    {"model_type": "gemma3_text", "num_hidden_layers": 8, "rope_theta": 500.0},
    {
        "model_type": "gemma3_text",
        "num_hidden_layers": 8,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    {
        "model_type": "gemma3_text",
        "num_hidden_layers": 8,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}},
    },
    {"model_type": "t5", "feed_forward_proj": "gated-silu"},
    {"model_type": "t5", "num_layers": 4, "num_hidden_layers": 4},
    {"model_type": "t5", "tie_word_embeddings": False},
    {"model_type": "mt5"},
    {"model_type": "switch_transformers", "num_decoder_layers": None, "num_layers": 6},
    {"model_type": "switch_transformers", "num_sparse_encoder_layers": 0},
    {"model_type": "m2m_100", "hidden_size": 512},
    {"model_type": "marian", "decoder_vocab_size": None},
    {"model_type": "nllb-moe", "encoder_sparse_step": 2},
)


def resolve(values: Mapping[str, Any]) -> dict[str, Any] | str:
    """Returns what transformers makes of a config: all keys of its class, or REFUSED."""
    import transformers

    cls = transformers.CONFIG_MAPPING[values["model_type"]]
    given = json.loads(json.dumps({k: v for k, v in values.items() if k != "model_type"}))
    try:
        config = cls.from_dict(given)
    except Exception:  # The checks of classes raise errors of many kinds.
        return REFUSED
    base = transformers.PretrainedConfig().to_dict().keys() - set(_BASE_KEYS)
    found = {name: value for name, value in config.to_dict().items() if name not in base}
    return json.loads(json.dumps({"model_type": values["model_type"], **found}))


def changes(values: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any] | str:
    """Returns the keys in which the config that `values` stands for differs from `whole`.

    A key that `whole` alone has becomes null.
    """
    found = resolve(values)
    if isinstance(found, str):
        return found
    gone = dict.fromkeys(whole.keys() - found.keys())
    return gone | {name: value for name, value in found.items() if whole.get(name, found) != value}


def record_case(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the whole config of a case, and how it changes where a key is missing or null.

    Keys whose absence only gives the class's default are left out of `missing`, and keys that
    must not be null are left out of `null`.

    Args:
      values: the config.
      defaults: the defaults of its class.
    """
    whole = resolve(values)
    assert isinstance(whole, dict), values
    keys = sorted(whole.keys() - {"model_type", *UNRECORDED})
    without = {key: {k: v for k, v in whole.items() if k != key} for key in keys}
    missing = {key: changes(without[key], whole) for key in keys}
    null = {key: changes(whole | {key: None}, whole) for key in keys}
    return {
        "whole": whole,
        "missing": {
            key: change
            for key, change in missing.items()
            if isinstance(change, str)
            or key not in defaults
            or whole | change != whole | {key: defaults[key]}
        },
        "null": {key: change for key, change in null.items() if change != REFUSED},
    }


def class_defaults(model_type: str) -> dict[str, Any]:
    """Returns the defaults that a class states for its own keys, before it derives others."""
    import dataclasses

    import transformers

    base = {field.name for field in dataclasses.fields(transformers.PretrainedConfig)}
    cls = transformers.CONFIG_MAPPING[model_type]
    return {
        field.name: field.default
        for field in dataclasses.fields(cls)
        if field.name not in base and field.default is not dataclasses.MISSING
    }


def main() -> None:
    """Writes the file."""
    import transformers

    types = sorted({case.model_type for case in CASES} | {w["model_type"] for w in WRITTEN})
    defaults = {name: class_defaults(name) for name in types}
    cases = {
        case.name: record_case(
            {"model_type": case.model_type, **case.values}, defaults[case.model_type]
        )
        for case in CASES
    }
    written = [{"given": values, "whole": resolve(values)} for values in WRITTEN]
    record = {
        "transformers": transformers.__version__,
        "defaults": defaults,
        "cases": cases,
        "written": written,
    }
    text = json.dumps(record).replace("Infinity", "null")
    for start in ('{"whole"', '{"given"', '"missing"', '"null"'):
        text = text.replace(start, f"\n{start}")
    FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
