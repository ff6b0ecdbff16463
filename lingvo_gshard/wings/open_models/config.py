"""PublishedConfig: a `config.json`, whose keys count if they do in transformers."""

from __future__ import annotations

import math
import os
import pathlib
import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from lingvo_gshard.core import UserError, atomic, names, objects
from lingvo_gshard.wings.open_models.wrappers import facts, text_values

CONFIG_FILE = "config.json"


class _Keys(msgspec.Struct, frozen=True):
    """Keys of transformers' configs, which config_keys.json lists.

    Attributes:
      usual: keys that many configs have and that describe no model, such as settings of generation.
        `auto_map` names code that the model was published with. It is never run.
      rope_numbers: rotary parameters that are numbers.
    """

    usual: frozenset[str]
    rope_numbers: frozenset[str]


_KEYS = objects.table_beside(__file__, "config_keys.json", _Keys)
_REQUIRED = object()
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
PACKING = "quantization_config"


_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def _how_to_get(name: str) -> str:
    """Returns what may be meant, or how to get a model named as on Hugging Face's hub."""
    if objects.is_file(f"{name}.index"):
        return ". Checkpoints of Lingvo have none and need an `experiment`"
    if near := names.nearest_file(name):
        return near
    if not _HUB_NAME.fullmatch(name) or name.endswith(".json"):
        return "; every published model has one"
    return (
        f". If {name} is a model of Hugging Face's hub, `hf download {name}` of the package "
        f"huggingface_hub gets it and prints where it is; a plan needs {CONFIG_FILE} alone"
    )


class PublishedConfig:
    """The values of a `config.json`. Families read them through `get`, which takes note.

    A key that is missing has the default of the class of transformers, and so has a key that the
    class ignores. A null in the file is not the same: it has the meaning that null has in
    transformers, which callers of `get` give.

    Attributes:
      where: the file, for messages.
      is_part: whether these are only the values of the language model in the file.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        ignored: Collection[str] = (),
        is_part: bool = False,
    ):
        """Takes the values.

        Args:
          where: the file, for messages.
          ignored: keys that may have any value, even an unsupported one.
          is_part: whether the file also describes parts that are no language model.
        """
        self.values, self.where, self.is_part = dict(values), where, is_part
        self._read: set[str] = set()
        self._ignored = frozenset(ignored)
        self._keys: Mapping[str, Any] | None = None
        self._aliases: Mapping[str, str] = {}
        self._refused: dict[str, str] = {}

    @classmethod
    def load(cls, path: str | os.PathLike, ignored: Collection[str] = ()) -> PublishedConfig:
        """Reads a `config.json`, given as a file or as the directory that holds it.

        Args:
          path: the file or the directory.
          ignored: keys that may have any value, even an unsupported one.

        Raises:
          UserError: the file is missing, or holds no JSON object.
        """
        file = pathlib.Path(path)
        if file.is_dir():
            file /= CONFIG_FILE
        try:
            values = atomic.loads(objects.read_text(file))
        except FileNotFoundError:
            raise UserError(f"{file}: there is no such file{_how_to_get(str(path))}") from None
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise UserError(f"{file} is no JSON: {error}") from None
        if not isinstance(values, dict):
            raise UserError(f"{file} holds a {type(values).__name__}; a JSON object was expected")
        is_part = values.get("model_type") in facts().texts
        if is_part:
            values = text_values(values, str(file))
        return cls(values, str(file), ignored, is_part)

    def take_keys(self, keys: Mapping[str, Any], aliases: Mapping[str, str]) -> None:
        """Says which keys count, and gives those that are missing their values.

        Args:
          keys: key that has an effect -> the value that it has where the file lacks it.
          aliases: another name of a key -> the key.

        Raises:
          UserError: the file has two values for a key.
        """
        self._keys, self._aliases = keys, aliases
        self._read, self._refused = set(), {}
        for alias, name in aliases.items():
            values = [self.values[key] for key in (alias, name) if key in self.values]
            if len(values) == 2 and values[0] != values[1] and any(values):
                raise UserError(
                    f"{self.where}: {alias} is {values[0]!r} and {name} is {values[1]!r}, but they "
                    "are two names of one setting; remove the wrong one"
                )

    def is_given(self, name: str) -> bool:
        """Returns whether the file has a key that counts, and not null."""
        return self.counts(name) and self.values.get(name) is not None

    def counts(self, name: str) -> bool:
        """Returns whether a key has an effect."""
        return self._keys is None or name in self._keys

    def get(
        self,
        name: str,
        default: Any = _REQUIRED,
        kind: type | None = None,
        least: float | None = None,
    ) -> Any:
        """Returns a value. A key that the file lacks has the default of the family.

        Args:
          name: the key.
          default: the value that null stands for. A missing key has it, too, if the family states
            no default. Without this argument, the key must have a value.
          kind: the value's type. None takes the default's type; a key without a default must then
            have a whole number above 0.
          least: the least number; None: any.

        Raises:
          UserError: the key has no value and no default, or has a value of another type.
        """
        value = self._value(name)
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

    def _value(self, name: str) -> Any:
        """Returns what the file has for a key, or the family's default; takes note."""
        names_of = (name, *(alias for alias, key in self._aliases.items() if key == name))
        self._read.update(names_of)
        given = (key for key in names_of if key in self.values and self.counts(key))
        found = next((self.values[key] for key in given), _REQUIRED)
        return (self._keys or {}).get(name) if found is _REQUIRED else found

    def _check(self, name: str, value: Any, kind: type, least: float | None) -> None:
        """Raises ValueError if a value has another type, is too small, or is not finite."""
        types = (int, float) if kind is float else kind
        may_be_bool = kind in (bool, object)
        is_kind = isinstance(value, types) and (may_be_bool or not isinstance(value, bool))
        is_finite = not isinstance(value, float) or math.isfinite(value)
        if is_kind and is_finite and (least is None or value >= least):
            return
        limit = "" if least is None else f", {least} or more,"
        expected = f"{_KINDS.get(kind, kind.__name__)}{limit}"
        raise UserError(f"{self.where}: {name} is {value!r}; {expected} was expected")

    def skip(self, *names: str) -> None:
        """Takes note of keys that may have any value, since the other keys leave them no effect."""
        for name in names:
            self.get(name, None, object)

    def expect(self, name: str, *valid: Any, beside: str = "") -> Any:
        """Returns a value, which is the first valid one if the key is missing.

        For another value, `check` raises an error unless the key is ignored. The error also says
        beside which other key the value is not valid.
        """
        value = self.get(name, valid[0], object)
        if value in valid:
            return value
        given = f"{value!r} with {beside}" if beside else repr(value)
        self._refused[name] = _unsupported(name, given, " or ".join(map(repr, valid)))
        return valid[0]

    def rope(self) -> dict[str, Any]:
        """Returns the rotary parameters: `rope_type`, `rope_theta` and parameters of the scaling.

        transformers 5 writes them as `rope_parameters`. Earlier versions wrote two keys,
        `rope_theta` and `rope_scaling`. If a file has both forms, `rope_scaling` replaces
        `rope_parameters` as a whole, as in transformers.

        Raises:
          UserError: the base is missing, or would be lost with `rope_parameters`.
        """
        given = self.rope_entry("rope_parameters") or {}
        scaling = self.rope_entry("rope_scaling")
        found = scaling or given or (self._keys or {}).get("rope_parameters") or {}
        if "type" in found:
            found = {"rope_type": found["type"], **found}
        usual = {"rope_type": "default", "rope_theta": self.get("rope_theta", None, float)}
        fraction = self.get("partial_rotary_factor", None, float)
        if fraction is not None:
            usual["partial_rotary_factor"] = fraction
        merged = usual | found
        base = given.get("rope_theta")
        if scaling and base not in (None, merged["rope_theta"]):
            raise UserError(
                f"{self.where}: rope_scaling replaces rope_parameters, whose rope_theta of {base} "
                f"would become {merged['rope_theta']}. Write the scaling into rope_parameters, or "
                "rope_theta into rope_scaling"
            )
        if merged["rope_theta"] is None:
            raise UserError(f"{self.where} lacks rope_theta, which this family needs")
        return merged

    def rope_entry(self, name: str) -> dict[str, Any] | None:
        """Returns a key that has rotary parameters, whose numbers are numbers; None if it is null.

        Entries by type of layer are not checked.
        """
        if name not in self.values:
            self._read.add(name)
            return None
        found = self.get(name, None, dict)
        self.check_rope(found or {})
        return found

    def check_rope(self, found: Mapping[str, Any]) -> None:
        """Raises ValueError if a rotary parameter that is a number is none."""
        for key in _KEYS.rope_numbers.intersection(found):
            if found[key] is not None:
                self._check(f"{key} of the rotary parameters", found[key], float, None)

    def packing(self) -> dict[str, Any] | None:
        """Returns how the published tensors are packed; None if they are not.

        Raises:
          UserError: the key holds no object.
        """
        found = self.values.get(PACKING)
        if found is not None:
            self._check(PACKING, found, dict, None)
        return found

    def check(self) -> None:
        """Checks that all keys with an effect were read, and have supported values.

        Raises:
          UserError: some have other values. The message names all of them.
        """
        keys = self._keys or {}
        unread = (keys.keys() & self.values.keys()) - self._read
        differ = (name for name in unread if _differ(self.values[name], keys[name]))
        usual = {k: _unsupported(k, repr(self.values[k]), repr(keys[k])) for k in differ}
        refused = {k: v for k, v in (self._refused | usual).items() if k not in self._ignored}
        if refused:
            shown = "; ".join(refused[name] for name in sorted(refused))
            raise UserError(
                f"{self.where}: {shown}. transformers computes another model with other values. If "
                f"that does not matter, `ignore_keys={','.join(sorted(refused))}` says so"
            )

    def unknown(self, known: Collection[str]) -> list[str]:
        """Returns the keys with a value that are not known, and that few configs have."""
        others = self.values.keys() - _KEYS.usual - set(known)
        return [name for name, value in self.values.items() if name in others and value is not None]


def _unsupported(name: str, given: str, valid: str) -> str:
    return f"{name} is {given}, which is not supported; {valid} was expected"


def _differ(value: Any, usual: Any) -> bool:
    """Returns whether a value has another effect than a missing key, whose value is `usual`."""
    is_off = value is None or value is False or value in ({}, [])
    return value != usual and not (is_off and not usual)
