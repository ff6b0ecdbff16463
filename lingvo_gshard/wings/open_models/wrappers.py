"""The text part of published models that also see images.

Its config is the `text_config` of the whole config. Its tensors are a language model's, but their
names begin in another way. An import takes nothing else, and an export writes a language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lingvo_gshard.core import UserError

# `model_type` of a whole config -> whether its softmax shares the table if no key says so, as the
# published models of this type have it.
WRAPPERS = {
    "gemma3": True,
    "gemma4": True,
    "gemma4_unified": True,
    "kimi_k25": False,
    "llama4": False,
    "mistral3": False,
    "qwen3_5": False,
    "qwen3_5_moe": False,
    "qwen3_vl": False,
    "qwen3_vl_moe": False,
}
# `model_type` of a whole config -> that of a text_config without one. Others have a class of texts.
_USUAL = {"kimi_k25": "deepseek_v3", "mistral3": "mistral"}
# `model_type` of a text_config -> the language model that computes the same for texts.
_SAME = {
    "gemma4_unified_text": "gemma4_text",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
# Defaults of a text_config that differ from the language model's.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma4_unified_text": {"max_position_embeddings": 262144, "sliding_window": 1024},
    "qwen3_vl_text": {"max_position_embeddings": 128000, "rope_theta": 500000.0},
    "qwen3_vl_moe_text": {
        "intermediate_size": 5632,
        "max_position_embeddings": 128000,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 16,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 16,
        "rope_theta": 500000.0,
    },
}
# Keys of a text_config whose values its class does not read.
_FIXED: dict[str, dict[str, Any]] = {
    "gemma4_unified_text": {"enable_moe_block": False, "hidden_size_per_layer_input": 0},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
}
_TIED = "tie_word_embeddings"
# Keys of the whole config that a language model has, too.
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "torch_dtype")
# A beginning of names of the text part's tensors -> the beginning in a language model.
_BEGINNINGS = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}


def text_values(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the values of the language model within a whole config.

    Args:
      values: the values of the whole `config.json`.
      where: the file, for messages.

    Raises:
      UserError: it has no text_config.
    """
    wrapper, text = values.get("model_type"), values.get("text_config")
    if not isinstance(text, dict):
        raise UserError(f"{where} lacks text_config, in which a {wrapper} has its language model")
    found = {name: values[name] for name in _KEPT if name in values} | text
    kind = str(text.get("model_type") or _USUAL.get(str(wrapper), f"{wrapper}_text"))
    found = _DEFAULTS.get(kind, {}) | found | _FIXED.get(kind, {})
    if kind == "qwen3_vl_moe_text":
        _set_experts(found)
    tied = values.get(_TIED)
    found[_TIED] = text.get(_TIED, WRAPPERS[str(wrapper)]) if tied is None else tied
    found["model_type"] = _SAME.get(kind, kind)
    return found


def _set_experts(values: dict[str, Any]) -> None:
    """Gives the experts of Qwen3-VL-MoE the defaults that depend on other keys."""
    if not {"num_experts", "num_local_experts"} & values.keys():
        values["num_experts"] = 60
    heads = values["num_attention_heads"]
    if values.get("head_dim") is None and "hidden_size" in values:
        values["head_dim"] = values["hidden_size"] // heads


def text_name(name: str) -> str | None:
    """Returns the name of a tensor in a language model; None for a tensor of another part."""
    for beginning, ours in _BEGINNINGS.items():
        if name.startswith(beginning):
            return ours + name.removeprefix(beginning)
    return None
