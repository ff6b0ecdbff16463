"""The reference of hyperparameters: where each class stands in experiments, and the classes.

Beside the classes of the experiments are those that a setting may name in their place, such as
another optimizer. A class is described once, however many paths lead to it. Hyperparameters of a
base class are in the table of the base class alone.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from docs.site.markdown import cell
from lingvo_gshard.core import Params, registry
from lingvo_gshard.core.config.params import Configurable
from lingvo_gshard.core.layer import Layer
from lingvo_gshard.wings.gin.binding import gin_name

# Experiments whose trees together have the hyperparameters of tasks, inputs and steps.
TREES = ("translation.quickstart", "language_model.quickstart")
_LONGEST = 60


def page() -> str:
    """Returns the page of hyperparameters."""
    trees = {name: registry.get(name) for name in TREES}
    parts = [
        "# Hyperparameters",
        "",
        "A hyperparameter has a dotted path: the path of a node, and a name of the node's class. "
        "[`--gin_param`](commands/flags.md#--gin_param) sets one, as in "
        "`--gin_param='step.clip_norm = 1.0'`, and so does `--step.clip_norm=1.0`. "
        "[`gshard-train --params`](commands/train.md#--params) prints those of any experiment.",
        "",
        "## Paths",
        "",
        "The settings are those that differ from the defaults of the class. A row that stands in "
        "an earlier table is not repeated.",
        "",
    ]
    shown: set[str] = set()
    for name, params in trees.items():
        rows = [row for row in _rows_of(params) if row not in shown]
        parts += [f"### {name}", "", "| path | class | settings |", "|---|---|---|", *rows, ""]
        shown.update(rows)
    parts += ["## Classes", ""]
    found = classes(trees.values())
    for cls in [*found, *_alternatives(found)]:
        parts += _class_section(cls)
    for name, params in _without_class(trees.values()).items():
        parts += [f"### {name}", "", "The experiment's own, of no class.", "", *_table(params), ""]
    return "\n".join(parts)


def classes(trees: Iterable[Params]) -> list[type[Configurable]]:
    """Returns the classes that have hyperparameters in some trees, base classes among them.

    Each class comes once, after its base classes, in the order in which the trees lead to it.
    """
    found: dict[type[Configurable], None] = {}
    for params in trees:
        for _, node in params.nodes():
            for base in reversed(_bases(node.cls) if node.cls else []):
                if len(dict(own(base).items())):
                    found.setdefault(base)
    return list(found)


def _alternatives(found: Sequence[type[Configurable]]) -> list[type[Configurable]]:
    """Returns the library's further classes with a base among some, such as other optimizers.

    Layer is not such a base: most layers are parts that another layer makes.
    """
    others: dict[type[Configurable], None] = {}
    for base in found:
        for cls in base.__subclasses__() if base is not Layer else []:
            if cls not in found and cls.__module__.startswith("lingvo_gshard."):
                others.setdefault(cls)
    below = _alternatives(list(others)) if others else []
    named = [cls for cls in [*others, *below] if dict(own(cls).items())]
    return sorted(dict.fromkeys(named), key=lambda cls: cls.__name__)


def _without_class(trees: Iterable[Params]) -> dict[str, Params]:
    """Returns the nodes that no class has, by the last part of their path."""
    found: dict[str, Params] = {}
    for params in trees:
        for path, node in params.nodes():
            if node.cls is None:
                found.setdefault(path.rpartition(".")[2], node)
    return found


def own(cls: type[Configurable]) -> Params:
    """Returns the Params of a class without those that it has from its bases unchanged."""
    result, inherited, params = Params(cls), _inherited(cls), cls.params()
    for name, entry in params._entries.items():
        is_new = name not in inherited or _declared(cls, name) != _declared(inherited[name], name)
        if is_new and not holds_params(entry.value):
            result._entries[name] = entry
    return result


def _declared(cls: type[Configurable], name: str) -> tuple[str, str, str]:
    """Returns the default of a hyperparameter, its accepted values, and its meaning."""
    params = cls.params()
    default = "" if holds_params(params.get(name)) else repr(params.get(name))
    return default, repr(params.constraint(name)), params.help(name)


def _inherited(cls: type[Configurable]) -> dict[str, type[Configurable]]:
    """Returns the nearest base class that has each hyperparameter of a class."""
    found: dict[str, type[Configurable]] = {}
    for base in _bases(cls)[1:]:
        for name, _ in base.params().items():
            found.setdefault(name, base)
    return found


def _bases(cls: type) -> list[type[Configurable]]:
    """Returns a class and its base classes that have Params, the class first."""
    return [base for base in inspect.getmro(cls) if issubclass(base, Configurable)][:-1]


def _rows_of(params: Params) -> Iterator[str]:
    """Yields a row for each node of an experiment."""
    for path, node in params.nodes():
        settings = [
            f"{name} = {_short(value)}"
            for name, value in node.items()
            if not holds_params(value) and repr(value) != repr(_default(node, name))
        ]
        kind = node.cls.__name__ if node.cls else path.rpartition(".")[2]
        place = f"`{gin_name(path)}`" if path else "the root"
        listed = ", ".join(f"`{each}`" for each in settings)
        yield f"| {place} | [{kind}](#{kind.lower()}) | {listed} |"


def _default(node: Params, name: str) -> Any:
    """Returns the default of a hyperparameter in the class of its node."""
    usual = node.cls.params() if node.cls else node
    return usual.get(name) if node.cls and name in usual else node.default(name)


def _class_section(cls: type[Configurable]) -> list[str]:
    lines = [f"### {cls.__name__}", "", *_about(cls)]
    bases = [base for base in _bases(cls)[1:] if dict(own(base).items())]
    if bases:
        links = [f"[{base.__name__}](#{base.__name__.lower()})" for base in bases]
        lines += [f"Also has those of {', '.join(links)}.", ""]
    return [*lines, *_table(own(cls)), ""]


def _table(params: Params) -> list[str]:
    lines = ["| name | default | meaning |", "|---|---|---|"]
    for name, value in params.items():
        meaning = f"{cell(params.help(name))}{_accepted(params, name)}"
        lines.append(f"| `{name}` | `{_short(value)}` | {meaning} |")
    return lines


# Where a sentence ends, but not after "et al.".
_SENTENCE = re.compile(r"(?<=\.)(?<!al\.)\s+(?=[A-Z`])")


def _about(cls: type) -> list[str]:
    """Returns the first sentence of a class's docstring, with an empty line."""
    first = " ".join(inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0].split())
    sentence = _SENTENCE.split(first)[0]
    return [cell(sentence), ""] if sentence else []


def _accepted(params: Params, name: str) -> str:
    """Returns what a hyperparameter accepts, as a further sentence; empty without a limit."""
    constraint = params.constraint(name)
    if constraint.choices:
        return f" *One of {', '.join(f'`{choice!r}`' for choice in constraint.choices)}.*"
    limits = constraint.range().removeprefix("of ")
    return f" *{limits[0].upper()}{limits[1:]}.*" if limits else ""


def holds_params(value: Any) -> bool:
    """Returns whether a value is a node, or a list of nodes."""
    if isinstance(value, (list, tuple)):
        return any(map(holds_params, value))
    return isinstance(value, Params)


def _short(value: Any) -> str:
    text = f"@{value.__qualname__}" if hasattr(value, "__qualname__") else repr(value)
    text = text if len(text) < _LONGEST else f"{text[: _LONGEST - 4]} ..."
    return text.replace("|", "\\|")
