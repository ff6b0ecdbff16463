"""Applies gin settings to Params.

Each node of an experiment's Params is a gin configurable with the node's path as its name. So this
is valid in a file or on a command line:

    include "wide.gin"
    width = 512
    task.encoder.model_dim = %width
    step.optimizer = @lingvo_gshard.training.step.adam.Adam
    step.optimizer.beta1 = 0.95

An element of a list, such as `layers[0]`, is called `layers_0` in gin, whose names are identifiers.
As in gin, leading parts of a path may be left out if one hyperparameter alone ends with the rest.
A name without a dot is a macro if another value uses it.
"""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import logging
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from gin import selector_map

from lingvo_gshard.core import Params, ParamsError, UserError, explained, names, params_text
from lingvo_gshard.wings.gin import reader
from lingvo_gshard.wings.gin.reader import Setting

_log = logging.getLogger(__name__)


def apply_gin(params: Params, files: Sequence[str], bindings: Sequence[str]) -> Params:
    """Returns a copy of Params with the settings of gin files, then of single bindings.

    A reference `@module.Class` replaces a node by the default Params of that class. Settings below
    the node apply to the new Params, wherever they are written.

    Args:
      files: Paths of gin files. Included files are searched in the working directory, the
        directory of the including file, and installed packages.
      bindings: Statements such as "run.steps = 100".

    Raises:
      UserError: A name is unknown or ambiguous, a value has another type than the default, or the
        gin syntax is invalid. The message names the gin path and the file and line or the binding.
    """
    result = params.copy().locate()
    settings = reader.read(files, bindings, _Namespace(result).example)
    references = [s for s in settings if reader.holds(s.value, reader.Reference)]
    values = [s for s in settings if not reader.holds(s.value, reader.Reference)]
    for setting in sorted(references, key=lambda s: s.name.count(".")):
        _Namespace(result).apply(setting)
    result.locate()
    namespace = _Namespace(result)
    for setting in values:
        namespace.apply(setting)
    return result


# Our last names of hyperparameters, each with the names that other libraries have for it.
_WORDS = {
    "batch_rows": ("batch_size", "global_batch_size", "per_device_batch_size", "train_batch_size"),
    "clip_norm": ("max_grad_norm", "clip_grad", "gradient_clipping_threshold"),
    "hidden_dim": ("intermediate_size", "ffn_hidden_size", "mlp_dim", "d_ff"),
    "learning_rate": ("lr", "peak_lr"),
    "micro_batches": ("gradient_accumulation_steps", "num_microbatches"),
    "model_dim": ("hidden_size", "d_model", "emb_dim", "n_embd"),
    "num_heads": ("num_attention_heads", "num_query_heads", "n_head"),
    "num_layers": ("num_hidden_layers", "num_decoder_layers", "n_layer"),
    "precision": ("dtype", "mp"),
    "size": ("vocab_size",),
    "steps": ("max_steps", "num_train_steps", "train_iters", "train_steps"),
}
# Fewer letters than this are part of too many names.
_SEARCHED = 3


class _Namespace:
    """The nodes of one tree of Params by their gin names."""

    def __init__(self, root: Params):
        self._root = root
        self._nodes = selector_map.SelectorMap()
        self._elements: dict[str, str] = {}
        for path, node in root.nodes():
            if path:
                self._nodes[gin_name(path)] = node
            if path.endswith("]"):
                self._elements[gin_name(path)] = path

    def apply(self, setting: Setting) -> None:
        """Sets one value. Raises ValueError if its name or type is wrong."""
        places = self._places(setting.name)
        name = setting.name.rpartition(".")[2]
        if name == setting.name and (setting.used or len(places) != 1) and name not in self._root:
            self._check_macro(setting)
            return
        if not places:
            raise UserError(
                f"{setting.where}: unknown name {setting.name!r}. {self.hint(setting.name)}"
            )
        if len(places) > 1:
            several = ", ".join(path for path, _ in places)
            raise UserError(f"{setting.where}: {setting.name!r} is ambiguous: {several}")
        gin_path, node = places[0]
        if name in node:
            default = node.default(name)
            exemplar = default if getattr(node, name) is None else getattr(node, name)
            nullable = default is None or getattr(node, name) is None
            value = _convert(setting, gin_path, exemplar, nullable)
            try:
                setattr(node, name, value)
            except ParamsError as error:
                raise ParamsError(f"{setting.where}: {error}") from None
        else:
            value = _convert(setting, gin_path, self._nodes[gin_path], nullable=False)
            self._root.set_path(self._elements[gin_path], value)

    def _places(self, name: str) -> list[tuple[str, Params]]:
        """Returns the path and the node of each hyperparameter that a name may mean, sorted."""
        selector, _, last = name.rpartition(".")
        if not selector and last in self._root:
            return [(last, self._root)]
        found = self._nodes.matching_selectors(selector) if selector else dict(self._nodes.items())
        paths = {f"{path}.{last}": self._nodes[path] for path in sorted(found)}
        is_there = {path: last in node or path in self._elements for path, node in paths.items()}
        return [(path, node) for path, node in paths.items() if is_there[path]]

    def example(self, name: str) -> Any:
        """Returns the value of a hyperparameter; None if a name means none or several."""
        places = self._places(name)
        last = name.rpartition(".")[2]
        return getattr(places[0][1], last, None) if len(places) == 1 else None

    def _check_macro(self, setting: Setting) -> None:
        """Rejects an unused macro on the command line and warns of one in a file."""
        if setting.used:
            return
        message = (
            f"{setting.where}: no value uses the macro {setting.name!r}, and it is not the last "
            f"name of one hyperparameter alone. {self.hint(setting.name)}"
        )
        if not setting.in_file:
            raise UserError(message)
        _log.warning("%s", message)

    def hint(self, name: str) -> str:
        """Suggests today's name of an old one, or names with a similar last part.

        Names anywhere that contain the last part are suggested, too. Without any of these, the
        names below the known part are suggested.
        """
        everything = list(self._all_names())
        today = params_text.path_today(name)
        if today != name and today in everything:
            return f"Did you mean {today!r}?"
        if exact := self.ending(name):
            below = [path for path in exact if path.startswith(f"{name.rpartition('.')[0]}.")]
            return names.any_of(difflib.get_close_matches(name, exact, 1, 0.9) or below or exact)
        steps = name.split(".")
        endings = {full.rpartition(".")[2] for full in everything}
        parent = ".".join(steps[:-1])
        if parent in self._nodes:
            siblings = [child.rpartition(".")[2] for child in _gin_children(self._nodes[parent])]
            # A longer name is no slip of the hand: the name itself may be elsewhere.
            alike = [name for name in siblings if abs(len(name) - len(steps[-1])) < 2]
            for found in difflib.get_close_matches(steps[-1], alike, n=1, cutoff=0.8):
                return f"Did you mean {f'{parent}.{found}'!r}?"
        close = difflib.get_close_matches(steps[-1], endings, n=1, cutoff=0.8)
        alike = [full for full in everything if full.rpartition(".")[2] in close]
        if difflib.get_close_matches(name, alike, n=1, cutoff=0.8):
            return names.nearest(name, alike)
        if len(steps[-1]) >= _SEARCHED:
            alike += [full for full in everything if steps[-1] in full.rpartition(".")[2]]
        if alike:
            return names.any_of(alike)
        node, known = self._root, 0
        while known < len(steps) - 1 and ".".join(steps[: known + 1]) in self._nodes:
            known += 1
            node = self._nodes[".".join(steps[:known])]
        return names.nearest(steps[known], _gin_children(node))

    def ending(self, name: str) -> list[str]:
        """Returns the paths with the last part of a name, or with our word for it."""
        last = name.rpartition(".")[2]
        everything = [(full, full.rpartition(".")[2]) for full in self._all_names()]
        if last not in (ending for _, ending in everything):
            last = next((own for own, words in _WORDS.items() if last in words), last)
        return [full for full, ending in everything if ending == last]

    def _all_names(self) -> Iterator[str]:
        yield from _gin_children(self._root)
        for path, node in self._nodes.items():
            for child in _gin_children(node):
                yield f"{path}.{child}"


def paths_ending(params: Params, name: str) -> list[str]:
    """Returns the gin paths whose last part is a name, or our word for it."""
    return _Namespace(params).ending(name)


def _convert(setting: Setting, gin_path: str, exemplar: Any, nullable: bool) -> Any:
    with explained(f"{setting.where}: {gin_path}", ValueError):
        return reader.convert(setting.value, exemplar, nullable)


def gin_name(path: str) -> str:
    """Returns the name in gin of a path: `layers_0` for `layers[0]`."""
    return re.sub(r"\[(\d+)\]", r"_\1", path)


def _gin_children(node: Params) -> list[str]:
    """Returns the gin names of a node's values and of the elements of its lists."""
    below = [gin_name(path) for path, _ in node.nodes()]
    return [name for name, _ in node.items()] + [path for path in below if path and "." not in path]


_WIDTH = 98


def to_gin(params: Params, pattern: str = "") -> str:
    """Returns the hyperparameters of a tree as gin settings, each below its meaning.

    Args:
      pattern: Part of the paths to write, such as "dropout", or a pattern with wildcards for whole
        paths, such as "trainer.*". Empty writes all.

    Raises:
      UserError: No path matches. The message has the nearest names.
    """
    settings = [setting for setting in _settings(params) if _matches(setting[0], pattern)]
    if not settings:
        ends = {path.rpartition(".")[2] for path, _, _ in _settings(params)}
        raise UserError(
            f"`params={pattern}`: no hyperparameter matches. {names.nearest(pattern, ends)}"
        )
    return "\n".join(f"{_comment(meaning)}{path} = {value}\n" for path, value, meaning in settings)


def _matches(path: str, pattern: str) -> bool:
    if any(character in pattern for character in "*?["):
        return fnmatch.fnmatchcase(path, pattern)
    return pattern.lower() in path.lower()


def _settings(root: Params) -> list[tuple[str, str, str]]:
    """Returns (path, value, meaning) of each value, and of each class that can be replaced."""
    settings = []
    for path, node in root.nodes():
        name = gin_name(path)
        if path and node.cls is not None:
            meaning = (inspect.getdoc(node.cls) or "").partition("\n")[0]
            settings.append((name, _literal(node.cls), meaning))
        for child, value in node.items():
            if not reader.holds(value, Params):
                full = f"{name}.{child}".lstrip(".")
                settings.append((full, _literal(value), _meaning(node, child)))
    return settings


def _meaning(node: Params, name: str) -> str:
    """Returns the help of a hyperparameter, its range, and the class's default if changed."""
    parts = [node.help(name)]
    limits = node.constraint(name).range()
    if limits:
        parts.append(f"A number {limits}.")
    value, default = getattr(node, name), node.default(name)
    if not reader.holds(default, Params) and value != default:
        owner = node.cls.__name__ if node.cls else "the class"
        parts.append(f"Default of {owner}: {_literal(default)}.")
    return " ".join(parts)


def _comment(text: str) -> str:
    lines = textwrap.wrap(" ".join(text.split()), _WIDTH)
    return "".join(f"# {line}\n" for line in lines)


def _literal(value: Any) -> str:
    """Returns a value as gin: a reference for a class or function."""
    if hasattr(value, "__qualname__"):
        return f"@{value.__module__}.{value.__qualname__}"
    return repr(value)
