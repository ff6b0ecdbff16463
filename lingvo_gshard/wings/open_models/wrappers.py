"""The text part of published models that also see images.

Its config is the `text_config` of the whole config. Its tensors are a language model's, but their
names begin in another way. An import takes nothing else, and an export writes a language model.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import msgspec

from lingvo_gshard.core import UserError, objects

_TIED = "tie_word_embeddings"


class WrapperFacts(msgspec.Struct, forbid_unknown_fields=True):
    """The content of wrappers.json.

    Attributes:
      texts: wrapper -> the `model_type` of a text_config without one.
      tied: wrappers whose softmax shares the table if no key says so, as in the published models.
      same: `model_type` of a text_config -> a language model with the same computation.
      defaults: `model_type` of a text_config -> defaults that differ from the language model's.
      fixed: `model_type` of a text_config -> keys that its class ignores, with their values.
      kept: keys of the whole config that a language model has, too.
      beginnings: beginning of a name in the text part -> beginning in a language model.
    """

    texts: dict[str, str]
    tied: tuple[str, ...]
    same: dict[str, str]
    defaults: dict[str, dict[str, Any]]
    fixed: dict[str, dict[str, Any]]
    kept: tuple[str, ...]
    beginnings: dict[str, str]


@functools.cache
def facts() -> WrapperFacts:
    """Returns the content of wrappers.json: facts of configs that contain a language model's."""
    return objects.table_beside(__file__, "wrappers.json", WrapperFacts)


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
    kind = str(text.get("model_type") or facts().texts[str(wrapper)])
    found = {name: values[name] for name in facts().kept if name in values} | text
    found = facts().defaults.get(kind, {}) | found | facts().fixed.get(kind, {})
    if kind == "qwen3_vl_moe_text":
        _set_experts(found)
    tied = values.get(_TIED)
    found[_TIED] = text.get(_TIED, wrapper in facts().tied) if tied is None else tied
    found["model_type"] = facts().same.get(kind, kind)
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
    for beginning, ours in facts().beginnings.items():
        if name.startswith(beginning):
            return ours + name.removeprefix(beginning)
    return None
