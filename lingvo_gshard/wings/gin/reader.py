"""Reads gin files and bindings into a list of settings.

It uses the parser of gin-config (https://github.com/google/gin-config), but not gin's global
configuration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import os
import pathlib
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from gin import config_parser

from lingvo_gshard.core import (
    Configurable,
    Params,
    UserError,
    explained,
    names,
    objects,
    params_text,
    registry,
)


@dataclasses.dataclass(frozen=True)
class Reference:
    """A value `@module.Class`.

    Attributes:
      name: Dotted name of the class.
      evaluate: Whether it is written with parentheses, `@module.Class()`.
    """

    name: str
    evaluate: bool


@dataclasses.dataclass(frozen=True)
class Macro:
    """A value `%name`, which stands for the value of a macro."""

    name: str


@dataclasses.dataclass(frozen=True)
class Setting:
    """One binding `name = value`.

    Attributes:
      name: Left side. In gin a name without a dot defines a macro.
      where: File and line, or the binding, for messages.
      in_file: Whether it comes from a file rather than the command line.
      used: Whether another value uses it as a macro.
    """

    name: str
    value: Any
    where: str
    in_file: bool
    used: bool = False


def read(
    files: Sequence[str], bindings: Sequence[str], example: Callable[[str], Any]
) -> list[Setting]:
    """Returns the settings of files, then of bindings, in the order written.

    Macros are replaced by their values. As in gin, the last definition of a macro wins.

    Args:
      example: Returns a value that a name may have, for hints; None for an unknown name.

    Raises:
      UserError: A file is missing or includes itself, the syntax is invalid, a macro is unknown,
        or a statement is a gin scope or import. The message names the file and line or the binding.
    """
    reader = _Reader(example)
    for name in files:
        reader.read_file(name, including="", source="`gin_files`")
    for binding in bindings:
        reader.read_binding(binding)
    return _resolve_macros(reader.settings)


def is_value(text: str) -> bool:
    """Returns whether a text can stand on the right side of a setting."""
    try:
        _Reader(lambda name: None).read_binding(f"x = {text}")
    except UserError:
        return False
    return True


def holds(value: Any, kind: type) -> bool:
    """Returns whether a value is of a class, or a list that contains such a value."""
    if isinstance(value, (list, tuple)):
        return any(holds(element, kind) for element in value)
    return isinstance(value, kind)


class _Delegate(config_parser.ParserDelegate):
    """Tells gin's parser how to build values that are not literals."""

    def configurable_reference(self, scoped_configurable_name, evaluate):
        return Reference(scoped_configurable_name, evaluate)

    def macro(self, macro_name):
        return Macro(macro_name)


class _Reader:
    """Collects settings from files and rejects recursive includes."""

    def __init__(self, example: Callable[[str], Any]):
        self._example = example
        self.settings: list[Setting] = []
        self._open_files: list[str] = []

    def read_file(self, name: str, including: str, source: str) -> None:
        """Reads a file.

        Args:
          including: Path of the file that includes it; empty if an option names it.
          source: The option or include statement, for messages.
        """
        path = _find(name, including)
        if path is None:
            raise UserError(f"{source}: there is no file {name!r}")
        identity = os.path.realpath(path)
        if identity in self._open_files:
            raise UserError(f"{source}: {name!r} includes itself")
        self._open_files.append(identity)
        with explained(f"{path}: not UTF-8", UnicodeDecodeError):
            with open(path, encoding="utf-8") as file:
                self._read(file, path)
        self._open_files.pop()

    def read_binding(self, binding: str) -> None:
        """Reads one binding of the command line."""
        self._read(binding, None)

    def _read(self, text: Any, path: str | None) -> None:
        option = "" if path else f"`settings` {text!r}"
        try:
            for statement in config_parser.ConfigParser(text, _Delegate()):
                where = f"{path}:{statement.location.line_num}" if path else option
                self._take(statement, path, where)
        except SyntaxError as error:
            where = f"{path}:{error.lineno}" if path else option
            reason = error.msg.splitlines()[-1].strip().rstrip(".")
            reason = "text follows the value" if reason == "Expected newline" else reason
            line = error.text or (text if isinstance(text, str) else "")
            raise UserError(f"{where}: {reason}{_hint(line, self._example)}") from None
        except tokenize.TokenError as error:
            message, (line, _) = error.args
            where = f"{path}:{line}" if path else option
            raise UserError(f'{where}: {message}. Close each bracket and each """') from None

    def _take(self, statement: Any, path: str | None, where: str) -> None:
        if isinstance(statement, config_parser.IncludeStatement):
            self.read_file(statement.filename, including=path or "", source=where)
        elif isinstance(statement, config_parser.ImportStatement):
            raise UserError(
                f"{where}: {statement.format()!r}: imports are not supported. "
                "Write full class names, such as x = @package.module.Class"
            )
        elif isinstance(statement, config_parser.BindingStatement):
            if statement.scope and statement.arg_name:
                raise UserError(f"{where}: gin scopes ({statement.scope}/) are not supported")
            prefix = f"{statement.scope}/" if statement.scope else ""
            name = f"{statement.selector}.{statement.arg_name}".rstrip(".")
            self.settings.append(Setting(prefix + name, statement.value, where, path is not None))


def _find(name: str, including: str) -> str | None:
    """Finds a file in the working directory, the including file's directory, or a package."""
    candidates = [name, os.path.join(os.path.dirname(including), name)]
    folder, file = os.path.split(name)
    package = folder.replace("/", ".")
    if all(part.isidentifier() for part in package.split(".")):
        try:
            spec = importlib.util.find_spec(package)
        except ImportError:
            spec = None
        roots = spec.submodule_search_locations if spec else None
        candidates.extend(os.path.join(root, file) for root in roots or ())
    return next((path for path in candidates if os.path.isfile(path)), None)


def _hint(line: str, example: Callable[[str], Any]) -> str:
    """Returns a hint for common syntax errors; see `read` for `example`."""
    key, _, value = line.partition("=")
    if "[" in key:
        return ". Write layers_0, not layers[0], for an element of a list"
    value = value.strip()
    wanted = example(key.strip())
    is_text = isinstance(wanted, (str, tuple)) and re.fullmatch(r"[^\s'\"()\[\]]+", value)
    if is_text or value.isidentifier() and not isinstance(wanted, (bool, int, float)):
        return f'. Write strings in quotes: "{value}"'
    if "." in value and all(part.isidentifier() for part in value.split(".")):
        return f". Write classes and functions with an @: @{value}"
    if isinstance(wanted, (bool, int, float)) and re.fullmatch(r"[\w.,+-]+", value):
        return f"; expected {_kind(wanted)}, such as {wanted!r}"
    if isinstance(wanted, (bool, int, float, str)):
        return f". Write NAME = VALUE, such as {key.strip()} = {wanted!r}"
    return ". Write NAME = VALUE, such as run.steps = 100"


def _resolve_macros(settings: list[Setting]) -> list[Setting]:
    macros = {s.name: s for s in settings if "." not in s.name}
    used: set[str] = set()

    def resolve(value: Any, where: str, within: tuple[str, ...]) -> Any:
        if isinstance(value, Macro):
            if value.name not in macros:
                raise UserError(f"{where}: the macro %{value.name} is not defined")
            if value.name in within:
                raise UserError(f"{where}: the macro %{value.name} is defined by itself")
            used.add(value.name)
            macro = macros[value.name]
            return resolve(macro.value, macro.where, (*within, value.name))
        if isinstance(value, dict):
            return {k: resolve(v, where, within) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(resolve(v, where, within) for v in value)
        return value

    resolved = [
        dataclasses.replace(s, value=resolve(s.value, s.where, (s.name,))) for s in settings
    ]
    return [dataclasses.replace(s, used=s.name in used) for s in resolved]


def convert(value: Any, exemplar: Any, nullable: bool) -> Any:
    """Converts a value to the type of an exemplar.

    An int becomes a float, and a list a tuple, if the exemplar is one. A string becomes a tuple, if
    the exemplar is a tuple of strings or empty. If all elements of the exemplar have one type, the
    elements of the value must have it, too. A Reference becomes the default Params of the class or,
    if the exemplar is a function or class, the object itself.

    Args:
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
    if isinstance(value, str) and isinstance(exemplar, tuple) and {*map(type, exemplar)} <= {str}:
        return (value,)
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
        with explained(label.format(index), ValueError):
            converted.append(convert(value, exemplar, nullable))
    return converted


def _dereference(reference: Reference, exemplar: Any) -> Any:
    if reference.evaluate:
        raise UserError(f"@{reference.name}() would call it; write @{reference.name}")
    target = _import(reference.name, getattr(exemplar, "cls", None))
    if isinstance(exemplar, Params):
        _check_replaceable(target, exemplar.cls)
        return target.params()
    if exemplar is None and isinstance(target, type) and issubclass(target, Configurable):
        return target.params()
    if callable(target) and (exemplar is None or callable(exemplar)):
        return target
    if exemplar is None:
        raise UserError(f"@{reference.name} is a {_kind(target)}; expected a class or function")
    raise UserError(_mismatch("reference", f"@{reference.name}", exemplar, nullable=False))


def _import(name: str, replaced: type | None) -> Any:
    """Returns what a reference names, which may be to replace a class."""
    module_name, _, attribute = params_text.class_today(name).rpartition(".")
    expected = (
        "expected @package.module.Class, where the package is installed, in the current directory "
        "or on PYTHONPATH"
    )
    if not module_name:
        hint = _meant(name, replaced)
        raise UserError(f"@{name} names no module{hint and '.'}{hint or f'; {expected}'}")
    try:
        module = registry.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"@{name} cannot be imported ({error}); {expected}") from None
    if not hasattr(module, attribute):
        hint = _meant(attribute, replaced) or f" {names.nearest(attribute, dir(module))}"
        raise UserError(f"@{name} does not exist.{hint}")
    return getattr(module, attribute)


def _meant(name: str, replaced: type | None) -> str:
    """Suggests classes of the package whose name is the nearest, and that can replace a class."""
    modules = dict(_class_modules())
    for found in difflib.get_close_matches(name, modules):
        full = f"{modules[found]}.{found}"
        with contextlib.suppress(UserError):
            _check_replaceable(_import(full, None), replaced)
            return f" Did you mean @{full}?"
    return ""


def _class_modules() -> Iterator[tuple[str, str]]:
    """Yields each class in the files of the package, with its module."""
    root = pathlib.Path(__file__).parents[2]
    for path in sorted(root.rglob("*.py")):
        module = ".".join(path.relative_to(root.parent).with_suffix("").parts)
        text = objects.text_beside(str(path), path.name)
        for found in re.findall(r"^class ([A-Z]\w*)", text, re.MULTILINE):
            yield found, module


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
