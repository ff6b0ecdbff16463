"""Params: a tree of named and documented hyperparameters that refuses undefined names."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Collection, Iterator
from typing import Any

from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.constraints import Constraint
from lingvo_gshard.core.errors import UserError, explained

_INDEXED = re.compile(r"^(\w+)((?:\[\d+\])*)$")


class ParamsError(UserError):
    """A wrong hyperparameter. The message begins with its path, or with the path of its node."""


@dataclasses.dataclass
class _Entry:
    value: Any
    default: Any
    help: str
    constraint: Constraint
    changes_results: bool


class Params:
    """Hyperparameters of one configurable class, as a tree.

        p = Params(Dense)
        p.define("output_dim", 0, "Size of the output.", minimum=1)
        p.output_dim = 512
        p.get("encoder.layers[0].hidden_dim")

    Reading or setting an undefined name raises a ValueError that suggests the nearest one. So does
    setting a value of another type than the default's, or out of the declared range. A default may
    be out of range: it stands for a value that must be set before the class is instantiated.
    """

    def __init__(self, cls: type | None = None):
        self.__dict__["_cls"] = cls
        self.__dict__["_entries"] = {}
        self.__dict__["_frozen"] = False
        self.__dict__["_path"] = None

    @property
    def cls(self) -> type | None:
        """The class these Params configure."""
        return self._cls

    def define(
        self,
        name: str,
        default: Any,
        help: str,
        *,
        minimum: float | None = None,
        above: float | None = None,
        maximum: float | None = None,
        below: float | None = None,
        choices: Collection[str] = (),
        changes_results: bool = True,
    ) -> None:
        """Adds a hyperparameter.

        Args:
          name: Name of the hyperparameter, an identifier.
          default: Its default value, whose type other values must have. Defaults that are
            no number, bool or string accept any type. A number must be finite, and a whole number
            must fit into 32 bits.
          help: What it means, for users.
          minimum: Smallest number.
          above: Accepts only larger numbers than this.
          maximum: Largest number.
          below: Accepts only smaller numbers than this.
          choices: Accepts only these strings.
          changes_results: Whether a run computes something else with another value. If not, the
            value, and all below it, may change when a run resumes.

        Raises:
          UserError: The name is taken, reserved or not an identifier.
        """
        self._check_not_frozen(name)
        if not name.isidentifier() or hasattr(Params, name):
            raise ValueError(f"{name!r} cannot be the name of a hyperparameter")
        if name in self._entries:
            raise ValueError(f"Hyperparameter {name!r} is already defined")
        constraint = Constraint(minimum, above, maximum, below, choices)
        self._entries[name] = _Entry(default, default, help, constraint, changes_results)

    def define_fraction(self, name: str, default: float, help: str) -> None:
        """Adds a hyperparameter with numbers from 0 to less than 1."""
        self.define(name, default, help, minimum=0, below=1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._entry(name).value

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_not_frozen(name)
        entry = self._entry(name)
        entry.value = self._checked(name, value, accepts_default=True)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Params) and self._cls is other._cls and not self.diff(other)

    def __repr__(self) -> str:
        return self.to_text()

    def help(self, name: str) -> str:
        """Returns the help text of one hyperparameter."""
        return self._entry(name).help

    def default(self, name: str) -> Any:
        """Returns the default value of one hyperparameter."""
        return self._entry(name).default

    def constraint(self, name: str) -> Constraint:
        """Returns the values that one hyperparameter accepts."""
        return self._entry(name).constraint

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yields (name, value) in the order of definition."""
        for name, entry in self._entries.items():
            yield name, entry.value

    def set(self, **values: Any) -> Params:
        """Sets several hyperparameters of this node and returns it."""
        for name, value in values.items():
            setattr(self, name, value)
        return self

    def get(self, path: str) -> Any:
        """Returns the value at a dotted path such as `encoder.layers[0].hidden_dim`."""
        node: Any = self
        for step in _steps(path):
            node = _descend(node, step, path)
        return node

    def set_path(self, path: str, value: Any) -> None:
        """Sets the value at a dotted path."""
        *parents, last = _steps(path)
        node: Any = self
        for step in parents:
            node = _descend(node, step, path)
        if isinstance(last, int):
            self._check_not_frozen(path)
            _descend(node, last, path)
            if not isinstance(node, list):
                raise UserError(f"{path!r}: the elements of a tuple cannot be set one by one")
            node[last] = value
        elif isinstance(node, Params):
            _descend(node, last, path)
            setattr(node, last, value)
        else:
            raise UserError(f"{path!r}: the parent of {last!r} has no hyperparameters")

    def copy(self) -> Params:
        """Returns a deep, unfrozen copy; classes and functions are shared."""
        result = Params(self._cls)
        result.__dict__["_path"] = self._path
        for name, entry in self._entries.items():
            result._entries[name] = _Entry(
                _copy_value(entry.value),
                entry.default,
                entry.help,
                entry.constraint,
                entry.changes_results,
            )
        return result

    def locate(self, path: str = "") -> Params:
        """Remembers the path of each node for error messages, also in copies; returns this tree.

        Args:
          path: Path of this node; '' is the root.
        """
        for below, node in self.nodes(path):
            node.__dict__["_path"] = below
        return self

    def freeze(self) -> Params:
        """Makes this tree read-only and returns it."""
        self.__dict__["_frozen"] = True
        for _, value in self.items():
            for node in _params_within(value):
                node.freeze()
        return self

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Yields (dotted path, value) for every value that is not itself Params."""
        for name, value in self.items():
            yield from _leaves(value, name)

    def nodes(self, path: str = "") -> Iterator[tuple[str, Params]]:
        """Yields (dotted path, Params) for this node, whose path is '', and all nodes below it."""
        yield path, self
        for name, value in self.items():
            yield from _nodes(value, f"{path}.{name}" if path else name)

    def to_text(self) -> str:
        """Returns one `path : value` line per leaf, sorted by path."""
        return (
            "\n".join(f"{path} : {_format(value)}" for path, value in sorted(self.leaves())) + "\n"
        )

    def changes_results(self, path: str) -> bool:
        """Returns whether a run computes something else with another value at a dotted path.

        An unknown path changes results.
        """
        node: Any = self
        for step in _steps(path):
            if isinstance(node, Params):
                entry = node._entries.get(str(step))
                if entry is None:
                    return True
                if not entry.changes_results:
                    return False
                node = entry.value
            elif isinstance(step, int) and isinstance(node, (list, tuple)) and step < len(node):
                node = node[step]
            else:
                return True
        return True

    def diff(self, other: Params) -> list[tuple[str, str, str]]:
        """Returns (path, value, other value) as text for each difference of two trees."""
        mine, theirs = ({k: _format(v) for k, v in tree.leaves()} for tree in (self, other))
        absent = "(absent)"
        return [
            (path, mine.get(path, absent), theirs.get(path, absent))
            for path in sorted(mine.keys() | theirs.keys())
            if mine.get(path, absent) != theirs.get(path, absent)
        ]

    def instantiate(self, *args: Any, **kwargs: Any) -> Any:
        """Returns `cls(params, ...)`.

        Raises:
          ParamsError: The class refuses the Params. The message begins with their path if `locate`
            has set it.
        """
        if self._cls is None:
            raise ValueError("These Params configure no class, so they cannot be instantiated")
        try:
            return self._cls(self, *args, **kwargs)
        except ParamsError:
            raise
        except ValueError as error:
            if not self._path:
                raise
            raise ParamsError(f"{self._path}: {error}") from error

    def check(self) -> None:
        """Checks the values of this node against their declarations, its nodes' values excluded.

        Raises:
          ParamsError: A value has another type than the default or is out of range, or a default
            that is out of range was not replaced. The message names the path, the value, and the
            expected values.
        """
        for name, value in self.items():
            self._checked(name, value, accepts_default=False)

    def _checked(self, name: str, value: Any, accepts_default: bool) -> Any:
        """Returns a value in the type of the default. Raises ParamsError if it is not accepted."""
        entry = self._entries[name]
        try:
            return entry.constraint.converted(value, entry.default)
        except ValueError as problem:
            if accepts_default and type(value) is type(entry.default) and value == entry.default:
                return value
            owner = self._cls.__name__ if self._cls else "Params"
            path = f"{owner if self._path is None else self._path}.{name}".lstrip(".")
            raise ParamsError(f"{path} is {value!r}; {problem}") from None

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            owner = self._cls.__name__ if self._cls else "Params"
            raise UserError(f"{owner} has no hyperparameter {name!r}. {self._hint(name)}")
        return self._entries[name]

    def _hint(self, name: str) -> str:
        """Suggests a name of this node or, if none is near, names of the nodes below it."""
        hint = names.nearest(name, self._entries)
        below = [
            f"{path}.{child}".lstrip(".")
            for path, node in self.nodes()
            for child, _ in node.items()
            if name in child
        ]
        return names.any_of(below) if below and "Did you mean" not in hint else hint

    def _check_not_frozen(self, name: str) -> None:
        if self._frozen:
            raise ValueError(
                f"These Params are frozen: {name!r} cannot be changed. Copy them first."
            )


class Configurable:
    """A class whose objects are built from Params.

    `Class.params()` returns the default Params, and `Class(params)` builds an object.
    """

    @classmethod
    def params(cls) -> Params:
        """Returns the default Params of this class."""
        return Params(cls)

    def __init__(self, params: Params):
        """Keeps a frozen copy of the Params. Raises ParamsError if one is out of its range."""
        params.check()
        self.params_ = params.copy().freeze()

    @property
    def p(self) -> Params:
        """The frozen Params that this object was built from."""
        return self.params_


def _steps(path: str) -> list[str | int]:
    steps: list[str | int] = []
    for part in path.split("."):
        match = _INDEXED.match(part)
        if not match:
            raise UserError(f"{path!r} is not a dotted path: {part!r} is not a name")
        steps.append(match.group(1))
        steps.extend(int(index) for index in re.findall(r"\d+", match.group(2)))
    return steps


def _descend(node: Any, step: str | int, path: str) -> Any:
    if isinstance(step, int):
        if not isinstance(node, (list, tuple)) or step >= len(node):
            raise UserError(f"{path!r}: there is no element [{step}]")
        return node[step]
    if not isinstance(node, Params):
        raise UserError(f"{path!r}: the parent of {step!r} has no hyperparameters")
    if step == "cls":
        return node.cls
    with explained(f"{path!r}", ValueError):
        return node._entry(step).value


def _copy_value(value: Any) -> Any:
    if isinstance(value, Params):
        return value.copy()
    if isinstance(value, (list, tuple)):
        return type(value)(_copy_value(v) for v in value)
    if isinstance(value, dict):
        return {k: _copy_value(v) for k, v in value.items()}
    return value if callable(value) else copy.copy(value)


def _params_within(value: Any) -> Iterator[Params]:
    if isinstance(value, Params):
        yield value
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from _params_within(element)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Params):
        yield f"{path}.cls", value.cls
        for name, child in value.items():
            yield from _leaves(child, f"{path}.{name}")
    elif isinstance(value, (list, tuple)) and any(True for _ in _params_within(value)):
        for index, element in enumerate(value):
            yield from _leaves(element, f"{path}[{index}]")
    else:
        yield path, value


def _nodes(value: Any, path: str) -> Iterator[tuple[str, Params]]:
    if isinstance(value, Params):
        yield from value.nodes(path)
    elif isinstance(value, (list, tuple)):
        for index, element in enumerate(value):
            yield from _nodes(element, f"{path}[{index}]")


def _format(value: Any) -> str:
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)
