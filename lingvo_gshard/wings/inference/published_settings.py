"""PublishedSettings: how a published model is decoded by default, from generation_config.json."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import msgspec

from lingvo_gshard.core import UserError, atomic, explained, objects
from lingvo_gshard.wings.inference.options import DecodingOptions

SETTINGS_FILE = "generation_config.json"


class _Names(msgspec.Struct, frozen=True):
    """Names of published settings.

    Attributes:
      fields: name -> the field of DecodingOptions.
      known: names that the tokenizer reads, or that do not influence the choice of tokens. With
        forced_eos_token_id, a text of the largest length ends there; it does without, too.
      neutral_at_one: names whose value 1 asks for nothing.
    """

    fields: dict[str, str]
    known: list[str]
    neutral_at_one: list[str]


_NAMES = objects.table_beside(__file__, "published_settings.json", _Names)
# Fields that apply to drawing only.
_DRAWING = ("top_k", "top_p", "min_p", "repetition_penalty")
# Defaults of transformers for drawing.
_DRAWN = {"temperature": 1.0, "top_k": 50}
# Values of unknown names that ask for nothing.
_NEUTRAL = (None, False, 0, [], {}, "")


@dataclasses.dataclass(frozen=True)
class PublishedSettings:
    """The settings of one model.

    Attributes:
      fields: fields of DecodingOptions that the model was published with, JSON values.
      left_out: name of each setting that has no effect here -> why.
    """

    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, directory: pathlib.Path) -> PublishedSettings:
        """Returns the settings in a directory, if any. Raises UserError if the file is wrong."""
        path = directory / SETTINGS_FILE
        try:
            found = atomic.loads(objects.read_text(path))
        except FileNotFoundError:
            return cls()
        except ValueError as error:
            raise UserError(f"{path} is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise UserError(f"{path} is no JSON object")
        with explained(str(path), ValueError):
            return cls.of({name: value for name, value in found.items() if value is not None})

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> PublishedSettings:
        """Returns settings of published names and values. Raises UserError if a value is wrong."""
        fields = {
            ours: _checked(name, found) for name, ours in _NAMES.fields.items() if name in found
        }
        left_out = {
            name: "it is unknown here"
            for name, value in found.items()
            if name not in (*_NAMES.fields, *_NAMES.known) and value not in _NEUTRAL
            if not (name in _NAMES.neutral_at_one and value == 1)
        }
        if fields.get("least_tokens"):
            # The published number does not count the end, which may follow.
            most = fields.get("most_tokens") or math.inf
            fields["least_tokens"] = min(fields["least_tokens"] + 1, most)
        published = {ours: name for name, ours in _NAMES.fields.items()}
        searches = found.get("do_sample") is False or (
            "do_sample" not in found and found.get("num_beams", 1) > 1
        )
        if searches:
            for name in ("temperature", *_DRAWING):
                value = fields.pop(name, None)
                if value is not None and value != getattr(DecodingOptions, name):
                    left_out[published[name]] = "it applies to drawing, and do_sample is false"
            fields = {"temperature": 0.0, "beam_size": 1} | fields
        elif found.get("do_sample"):
            if fields.pop("beam_size", 1) > 1:
                left_out["num_beams"] = "do_sample is true, which needs one beam"
            fields = _DRAWN | fields | {"beam_size": 1}
        settings = cls(fields, left_out)
        settings.options(DecodingOptions(), {})
        return settings

    def values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns fields of DecodingOptions: the published fields, overridden by the given fields.

        A published field is left out if a given field makes it meaningless. For example, no tokens
        are drawn with a given beam or a given temperature of 0.
        """
        fields = dict(self.fields)
        if given.get("beam_size", 1) > 1 and "temperature" not in given and "temperature" in fields:
            fields["temperature"] = 0.0
        if given.get("temperature", 0) > 0 and "beam_size" in fields:
            fields["beam_size"] = 1
        merged = {**fields, **given}
        if merged.get("temperature") == 0:
            merged = {k: v for k, v in merged.items() if k not in _DRAWING or k in given}
        return merged

    def options(self, base: DecodingOptions, given: Mapping[str, Any]) -> DecodingOptions:
        """Returns decoding options. Given fields override published ones, which override `base`.

        Raises:
          UserError: options are wrong or do not go together.
        """
        return dataclasses.replace(base, **self.values(given))

    def within(self, positions: int) -> PublishedSettings:
        """Returns the settings for a language model whose rows have this many positions.

        A number of new tokens that leaves a beginning less than half a row becomes as many as fit.
        """
        if self.fields.get("most_tokens", 0) <= positions // 2:
            return self
        fields = {name: value for name, value in self.fields.items() if name != "most_tokens"}
        return dataclasses.replace(self, fields=fields)


def _checked(name: str, found: Mapping[str, Any]) -> Any:
    """Returns a published value; raises UserError if the value's type does not fit its field."""
    value, usual = found[name], getattr(DecodingOptions, _NAMES.fields[name])
    if isinstance(usual, tuple):
        is_right = isinstance(value, list) and all(type(each) is int for each in value)
    else:
        is_right = type(value) is int or (type(value) is float and isinstance(usual, float))
    if not is_right:
        wanted = "a list of ids" if isinstance(usual, tuple) else "a number"
        raise UserError(f"{name} is {value!r}; {wanted} was expected")
    return value
