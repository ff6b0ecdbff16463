"""PublishedConfig: a `config.json` whose every key is read, or known not to matter."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from lingvo_gshard.core.config import names
from lingvo_gshard.core.errors import UserError

CONFIG_FILE = "config.json"

# These keys do not change what a model computes, or only other libraries read them to train.
_HARMLESS = frozenset(
    (
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "max_position_embeddings",
        "model_type",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    )
)
_REQUIRED = object()
_ROPE_NUMBERS = frozenset(
    (
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "high_freq_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
    )
)
# Types of JSON, in words.
_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "an object",
}
# Says how the published tensors are packed; this does not change what the model computes.
_PACKING = "quantization_config"


class PublishedConfig:
    """The values of a `config.json`. Families read them through `get`, which takes note.

    Attributes:
      where: the file, for messages.
      values: all values.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = dict(values), where
        self._read: set[str] = set()

    @classmethod
    def load(cls, path: str | os.PathLike) -> PublishedConfig:
        """Reads a `config.json`, given as a file or as the directory that holds it.

        Raises:
          UserError: the file is missing, or holds no JSON object.
        """
        file = pathlib.Path(path)
        if file.is_dir():
            file /= CONFIG_FILE
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(
                f"{file}: there is no such file; every published model has one"
            ) from None
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file} is no JSON: {error}") from None
        if not isinstance(values, dict):
            raise UserError(f"{file} holds a {type(values).__name__}; a JSON object was expected")
        return cls(values, str(file))

    def get(
        self,
        name: str,
        default: Any = _REQUIRED,
        kind: type | None = None,
        least: float | None = None,
    ) -> Any:
        """Returns a value. None in the file, and a missing key, give the default.

        Args:
          name: the key.
          default: the default; a key without one must be there.
          kind: the value's type. None takes the default's type; a key without a default must then
            have a whole number above 0.
          least: the least number; None: any.

        Raises:
          UserError: the key is missing and has no default, or has a value of another type.
        """
        self._read.add(name)
        value = self.values.get(name)
        if value is None and default is _REQUIRED:
            raise UserError(f"{self.where} lacks {name}, which this family needs")
        if value is None:
            return default
        if default is _REQUIRED and kind is None:
            kind, least = int, 1
        if kind is None and default is not None:
            kind = type(default)
        if kind is not None:
            self._check(name, value, kind, least)
        return value

    def _check(self, name: str, value: Any, kind: type, least: float | None) -> None:
        """Raises ValueError if a value has another type, is too small, or is not finite."""
        types = (int, float) if kind is float else kind
        is_kind = isinstance(value, types) and (kind is bool or not isinstance(value, bool))
        is_finite = not isinstance(value, float) or math.isfinite(value)
        if is_kind and is_finite and (least is None or value >= least):
            return
        limit = "" if least is None else f", {least} or more,"
        expected = f"{_KINDS.get(kind, kind.__name__)}{limit}"
        raise UserError(f"{self.where}: {name} is {value!r}; {expected} was expected")

    def expect(self, name: str, *valid: Any) -> Any:
        """Returns a value, which is the first valid one if the key is missing.

        Raises:
          UserError: the value is another one.
        """
        value = self.get(name, valid[0])
        if value not in valid:
            shown = " or ".join(map(repr, valid))
            raise UserError(
                f"{self.where}: {name} is {value!r}, which is not supported; {shown} was expected"
            )
        return value

    def rope(self) -> dict[str, Any]:
        """Returns the rotary parameters: `rope_type`, `rope_theta` and parameters of the scaling.

        transformers 5 writes them as `rope_parameters`. Earlier versions wrote two keys,
        `rope_theta` and `rope_scaling`.
        """
        found = self.get("rope_scaling", None, dict) or {}
        found = self.get("rope_parameters", None, dict) or found
        for key in _ROPE_NUMBERS.intersection(found):
            if found[key] is not None:
                self._check(f"{key} of the rotary parameters", found[key], float, None)
        if "type" in found:
            found = {"rope_type": found["type"], **found}
        usual = {"rope_type": "default", "rope_theta": self.get("rope_theta", 10000.0)}
        fraction = self.get("partial_rotary_factor", None, float)
        if fraction is not None:
            usual["partial_rotary_factor"] = fraction
        return usual | found

    def check_unpacked(self) -> None:
        """Raises ValueError if the published tensors are packed, so that they cannot be read."""
        if self.values.get(_PACKING):
            raise UserError(
                f"{self.where} has a {_PACKING}: the tensors are packed. Load them with "
                f"transformers, with dequantize=True in its {_PACKING}, and save_pretrained"
            )

    def check_all_read(self) -> None:
        """Raises ValueError naming keys that were not read and may change the model."""
        left = [
            f"{name}={value!r}"
            for name, value in self.values.items()
            if value and name not in self._read and name not in (*_HARMLESS, _PACKING)
        ]
        if left:
            known = sorted(self._read)
            first = left[0].partition("=")[0]
            raise UserError(
                f"{self.where}: {', '.join(left[:5])} may change what the model computes, and this "
                f"family does not know it. {names.nearest(first, known)}"
            )
