"""Converts gin values to the types of the hyperparameters that they replace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lingvo_gshard.core.config import names, user_modules
from lingvo_gshard.core.config.gin_reader import Reference
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.errors import UserError


def convert(value: Any, exemplar: Any, nullable: bool) -> Any:
    """Converts a value to the type of an exemplar.

    An int becomes a float, and a list a tuple, if the exemplar is one. If all elements of the
    exemplar have one type, the elements of the value must have it, too. A Reference becomes the
    default Params of the class or, if the exemplar is a function or class, the object itself.

    Args:
      value: A value from gin.
      exemplar: A value of the expected type, or None to accept any type.
      nullable: Whether None is accepted.

    Raises:
      UserError: The types differ. The message names both.
    """
    if isinstance(value, Reference):
        return _dereference(value, exemplar)
    if value is None and nullable:
        return None
    if isinstance(exemplar, Params):
        raise UserError(f"this is a group of hyperparameters, which no {_kind(value)} can replace")
    if isinstance(exemplar, float) and type(value) is int:
        return float(value)
    if isinstance(value, (list, tuple)) and isinstance(exemplar, (list, tuple, type(None))):
        sequence = type(value) if exemplar is None else type(exemplar)
        return sequence(_convert_all(value, exemplar or (), "[{}]"))
    if isinstance(value, dict) and isinstance(exemplar, (dict, type(None))):
        converted = _convert_all(value.values(), (exemplar or {}).values(), "value {}")
        return dict(zip(value, converted, strict=True))
    if exemplar is not None and type(value) is not type(exemplar):
        raise UserError(_mismatch(_kind(value), value, exemplar, nullable))
    return value


def _convert_all(values: Iterable[Any], exemplars: Iterable[Any], label: str) -> list[Any]:
    present = [e for e in exemplars if e is not None]
    uniform = len({type(e) for e in present}) == 1
    exemplar = present[0] if uniform else None
    nullable = exemplar is None or None in exemplars
    converted = []
    for index, value in enumerate(values):
        try:
            converted.append(convert(value, exemplar, nullable))
        except ValueError as error:
            raise UserError(f"{label.format(index)}: {error}") from None
    return converted


def _dereference(reference: Reference, exemplar: Any) -> Any:
    if reference.evaluate:
        raise UserError(f"@{reference.name}() would call it; write @{reference.name}")
    target = _import(reference.name)
    if isinstance(exemplar, Params):
        _check_replaceable(target, exemplar.cls)
        return target.params()
    if exemplar is None and isinstance(target, type) and issubclass(target, Configurable):
        return target.params()
    if exemplar is None or (callable(exemplar) and callable(target)):
        return target
    raise UserError(_mismatch("reference", f"@{reference.name}", exemplar, nullable=False))


def _import(name: str) -> Any:
    module_name, _, attribute = name.rpartition(".")
    expected = (
        "expected @package.module.Class, where the package is installed, in the current directory "
        "or on PYTHONPATH"
    )
    if not module_name:
        raise UserError(f"@{name} names no module; {expected}")
    try:
        module = user_modules.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"@{name} cannot be imported ({error}); {expected}") from None
    if not hasattr(module, attribute):
        raise UserError(f"@{name} does not exist. {names.nearest(attribute, dir(module))}")
    return getattr(module, attribute)


def _check_replaceable(target: Any, cls: type | None) -> None:
    """Checks that a class may replace another: they share a base class below Configurable."""
    if not (isinstance(target, type) and issubclass(target, Configurable)):
        like = f", such as @{cls.__module__}.{cls.__qualname__}" if cls else ""
        got = getattr(target, "__qualname__", repr(target))
        raise UserError(f"expected a configurable class{like}; got {got}, which has no Params")
    if cls is None:
        return
    shared = [base for base in cls.__mro__ if issubclass(target, base)]
    if not (issubclass(shared[0], Configurable) and shared[0] is not Configurable):
        raise UserError(f"{target.__name__} cannot replace {cls.__name__}")


def _mismatch(kind: str, given: Any, exemplar: Any, nullable: bool) -> str:
    expected = _kind(exemplar) + (" or None" if nullable else "")
    return f"expected {expected}, such as {exemplar!r}; got the {kind} {given!r}"


def _kind(value: Any) -> str:
    if isinstance(value, type) or callable(value):
        return "class or function (@package.module.name)"
    return {str: "string", type(None): "None"}.get(type(value), type(value).__name__)
