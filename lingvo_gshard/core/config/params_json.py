"""Writes Params as JSON, for programs that do not have this package."""

from __future__ import annotations

from typing import Any

import msgspec

from lingvo_gshard.core.config.params import Params


def to_json(params: Params) -> str:
    """Returns Params as a JSON object.

    Each node is an object with its class, by dotted path, as `cls` and its hyperparameters by name.
    Classes and functions are given by their dotted paths.
    """
    return msgspec.json.format(msgspec.json.encode(_value(params)), indent=1).decode() + "\n"


def _value(value: Any) -> Any:
    """Returns a hyperparameter as JSON values."""
    if isinstance(value, Params):
        node = {"cls": _value(value.cls)}
        return node | {name: _value(child) for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_value(element) for element in value]
    if isinstance(value, dict):
        return {str(key): _value(element) for key, element in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)
