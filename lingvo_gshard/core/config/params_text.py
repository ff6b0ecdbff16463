"""Parses Params from their text form, so that a log directory describes its run by itself."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from lingvo_gshard.core.config import registry
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.config.registry import Experiment
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files import objects


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


# Old options of the trainer that belong to the run today. The other old options of the trainer
# belong to the step.
_OF_THE_RUN = frozenset(
    (
        "steps",
        "log_every_steps",
        "checkpoint_every_steps",
        "evaluate_every_steps",
        "keep_checkpoints",
        "keep_best",
        "patience",
        "writers",
        "routers",
        "hang_factor",
        "hang_seconds",
        "save_seconds",
        "check_determinism_every",
    )
)
_TRAINER = "trainer"
_RUN_OPTIONS = "lingvo_gshard.training.run.options"
# Module of an earlier version -> the module that has its classes today, both in the package.
RENAMED_MODULES = {
    "core.config.experiment": "core.config.registry",
    "data.cleaning.base": "wings.preparation.cleaning.cleaner",
    "data.cleaning.documents": "wings.preparation.cleaning.leaks",
    "data.preparation.preparation": "wings.preparation.preparation",
    "data.batching.mixture_plan": "wings.preparation.mixing",
    "data.prepared.mixture_plan": "wings.preparation.mixing",
    "data.prepared.planning.shares": "wings.preparation.mixing",
    "data.published_inputs": "wings.preparation.published_inputs",
    "data.published_text_input": "wings.preparation.published_inputs",
    "data.published_translation_input": "wings.preparation.published_inputs",
    "data.vocabularies.vocabulary_trainer": "wings.preparation.vocabularies.vocabulary_trainer",
    "data.vocabulary_trainer": "wings.preparation.vocabularies.vocabulary_trainer",
    "layers.lora": "wings.fine_tuning.lora",
    "layers.attention.latent.latent_attention": "wings.published_layers.latent_attention",
    "layers.attention.positions.rotary_scaling": "wings.published_layers.rotary_scaling",
    "layers.attention.positions.shared_relative_bias": "layers.attention.relative_bias",
    "layers.moe.dispatches.dropless": "wings.dropless.dispatch",
    "layers.moe.dispatches.buffers": "layers.moe.dispatches.dispatch",
    "layers.moe.routers.switch": "layers.moe.routers.top_k",
    "layers.stacks.pipeline": "wings.pipeline.pipeline",
    "layers.stacks.loop": "wings.repeat.loop",
    "layers.stacks.repeat": "wings.repeat.loop",
    "layers.stacks.sequential": "layers.stacks.execution",
    "tasks.preferences": "wings.fine_tuning.preferences",
    "tasks.future_token": "tasks.token_task",
    "training.local_updates": "wings.optimizers.local_updates",
    "training.loss_scale": "wings.low_precision.loss_scale",
    "training.monitoring.routers.settings": "wings.services.run_options",
    "training.spikes.rule": "wings.optimizers.spikes",
    "training.step.loss_scale": "wings.low_precision.loss_scale",
    "training.trainer": "training.step.trainer",
    **{
        f"layers.attention.{name}": f"wings.published_layers.{name}"
        for name in ("gated_delta_net", "indexed_attention", "latent_attention")
    },
    **{f"layers.attention.{name}": f"wings.long_inputs.{name}" for name in ("blockwise", "ring")},
    **{
        f"layers.moe.routers.{name}": f"wings.published_layers.routers.{name}"
        for name in ("forced_balance", "sigmoid", "sinkhorn", "sparse_mixer")
    },
    **{
        f"data.cleaning.{name}": f"wings.preparation.cleaning.{name}"
        for name in ("cleaner", "leaks", "near_duplicates")
    },
    **{
        f"data.streamed.{name}": f"wings.preparation.streamed.{name}"
        for name in ("examples", "inputs")
    },
    **{
        f"data.prepared.{name}": f"wings.preparation.prepared.{name}"
        for name in ("base_input", "language_model_input", "translation_input")
    },
    **{
        f"data.conversations.{name}": f"wings.fine_tuning.conversations.{name}"
        for name in ("conversation_input", "preference_input", "reader")
    },
    **{
        f"data.sources.{name}": f"wings.preparation.formats.{name}"
        for name in ("gettext", "keyed", "moses", "qt", "quoted", "units")
    },
    **{
        f"training.optim.{name}": f"training.step.{name}"
        for name in ("adafactor", "adam", "optimizer", "schedules")
    },
    **{f"training.optim.{name}": f"wings.optimizers.{name}" for name in ("lion", "momentum")},
    **{
        f"training.step.{name}": f"wings.optimizers.{name}"
        for name in ("lion", "local_updates", "momentum", "muon", "spikes")
    },
}
# Class of an earlier version -> the class today, where its module has other classes still.
RENAMED_CLASSES = {
    "layers.attention.positions.rotary_scaling.RotaryScaling": (
        "layers.attention.rotary.RotaryScaling"
    ),
    **{
        f"layers.attention.rotary.{name}Scaling": (
            f"wings.published_layers.rotary_scaling.{name}Scaling"
        )
        for name in ("AlphaNTK", "DynamicNTK", "Linear", "Llama3", "LongRope", "Yarn")
    },
    "training.run.options.Routers": "wings.services.run_options.Routers",
    "training.step.precision.Fp8": "wings.low_precision.fp8.Fp8",
    "training.step.precision.LossScale": "wings.low_precision.loss_scale.LossScale",
    **{
        f"{package}.{name}Router": f"wings.published_layers.routers.{name}Router"
        for package in ("layers.moe", "layers.moe.routers")
        for name in ("BiasedSoftmax", "ForcedBalance", "Sigmoid", "Sinkhorn", "SparseMixer")
    },
    **{
        f"{package}.DroplessDispatch": "wings.dropless.dispatch.DroplessDispatch"
        for package in ("layers.moe", "layers.moe.dispatches")
    },
}
# Class of an earlier version -> the subclass with options that the class had, and the values that
# these options have in a class without them.
_MOVED_OPTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "layers.attention.self_attention.SelfAttention": (
        "wings.published_layers.published_attention.PublishedAttention",
        {
            "chunk": "0",
            "has_output_gate": "False",
            "normalizes_rotated": "False",
            "rotary_pairs": "'halves'",
            "temperature_floor": "0",
            "temperature_scale": "0.1",
            "value_dim": "0",
            "value_scale": "1.0",
        },
    ),
}
# Folders of an earlier version that stand in wings/ today.
_IN_WINGS = ("export", "hlo", "inference", "kernels", "open_models", "planning", "profiling")
_PACKAGE = "lingvo_gshard."


def path_today(path: str) -> str:
    """Returns what a path of Params is called today."""
    first, _, rest = path.partition(".")
    if first != _TRAINER or not rest:
        return path
    name = rest.partition(".")[0]
    return f"{'run' if name in _OF_THE_RUN else 'step'}.{rest}"


def lines_today(lines: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    """Returns lines of a params.txt with today's names.

    Args:
      lines: (path, value, number of the line).
    """
    found = [(path_today(path), class_today(value), number) for path, value, number in lines]
    found = _without_moved_options(found)
    is_old = any(path == f"{_TRAINER}.cls" for path, _, _ in lines)
    return [*found, ("run.cls", f"{_RUN_OPTIONS}.RunOptions", 0)] if is_old else found


def _without_moved_options(lines: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    """Returns lines without the options that left a class, or with the class that has them."""
    values = {path: value for path, value, _ in lines}
    classes: dict[str, str] = {}
    left_out: set[str] = set()
    for path, value in values.items():
        own = value.removeprefix(_PACKAGE)
        if not path.endswith(".cls") or own not in _MOVED_OPTIONS:
            continue
        cls, usual = _MOVED_OPTIONS[own]
        options = {f"{path.removesuffix('cls')}{name}": usual[name] for name in usual}
        if all(values.get(option, default) == default for option, default in options.items()):
            left_out.update(options)
        else:
            classes[path] = f"{_PACKAGE}{cls}"
    return [(path, classes.get(path, v), n) for path, v, n in lines if path not in left_out]


def last_path(text: str) -> str | None:
    """Returns the path that the last line of an earlier version's params.txt has.

    None for a text of today's version.
    """
    return f"{_TRAINER}.writers" if f"\n{_TRAINER}." in text else None


def class_today(name: str) -> str:
    """Returns the dotted name that a class of an earlier version has today; others as they are."""
    own = name.removeprefix(_PACKAGE)
    module, _, attribute = own.rpartition(".")
    if name.startswith(_PACKAGE) and own in RENAMED_CLASSES:
        return f"{_PACKAGE}{RENAMED_CLASSES[own]}"
    if name.startswith(_PACKAGE) and own.partition(".")[0] in _IN_WINGS:
        return f"{_PACKAGE}wings.{own}"
    if not name.startswith(_PACKAGE) or module not in RENAMED_MODULES:
        return name
    return f"{_PACKAGE}{RENAMED_MODULES[module]}.{attribute}"


# One line: a path and a value.
_LONGEST_PATH = 4096
_LINE = re.compile(r"[A-Za-z_][\w.\[\]]* : ")
# Characters of a wrong value that messages show.
_SHOWN = 200
# The name of a class or function, with its module.
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def experiment_from_text(text: str) -> Params:
    """Returns an experiment's Params from the text that `Params.to_text` wrote.

    Hyperparameters that the text lacks keep their defaults. Names of earlier versions are known.

    Raises:
      UserError: a line is not `path : value`, its path, class or value is unknown, or it names a
        class of a module that the user has not named. Names the number of the line, or the modules.
    """
    root = Experiment.params().locate()
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        path, separator, value = line.partition(" : ")
        if not separator:
            raise UserError(f"line {number}: {line!r} is not 'path : value'")
        lines.append((path, value, number))
    lines = lines_today(lines)
    _check_modules(value for _, value, _ in lines)
    # A class creates its node with default children, which deeper lines replace or fill.
    for path, value, number in sorted(lines, key=_classes_first):
        try:
            _apply(root, path, value, len(lines))
        except ValueError as error:
            raise UserError(f"line {number}: {path}: {error}") from None
    return root.locate()


def _check_modules(values: Iterable[str]) -> None:
    """Checks that values name no class of a module that must not be imported."""
    names = {value.partition(".")[0] for value in values if _DOTTED.fullmatch(value)}
    foreign = sorted(name for name in names if not registry.is_trusted(name))
    if foreign:
        raise UserError(
            f"the Params name classes of {' and '.join(foreign)}, which is code of its own. If you "
            f"trust it, add `import={','.join(foreign)}`"
        )


def is_params_text(path: str | os.PathLike) -> bool:
    """Returns whether a file is the params.txt of a run and not gin, by its first line."""
    try:
        with objects.open_to_read(path) as file:
            return _LINE.match(file.readline(_LONGEST_PATH).decode("utf-8", "replace")) is not None
    except OSError:
        return False


def read(path: str | os.PathLike) -> Params:
    """Returns the Params in the params.txt of a run. Raises ValueError naming the file and line."""
    try:
        return experiment_from_text(objects.read_text(path))
    except ValueError as error:
        raise UserError(f"{os.fspath(path)}: {error}") from None


def _classes_first(line: tuple[str, str, int]) -> tuple:
    path, _, number = line
    return (not path.endswith(".cls"), path.count("."), number)


def _apply(root: Params, path: str, value: str, count: int) -> None:
    """Sets the value of one of `count` lines."""
    if not path.endswith(".cls"):
        root.set_path(path, _parse(value))
        return
    path, cls = path.removesuffix(".cls"), _parse(value)
    element = re.fullmatch(r"(.*)\[(\d+)\]", path)
    if element:
        _grow(root, element.group(1), int(element.group(2)), count)
    node = root.get(path)
    if cls is None or (isinstance(node, Params) and node.cls is cls):
        return
    if not (isinstance(cls, type) and issubclass(cls, Configurable)):
        raise UserError(f"{value} is no configurable class, which has Params")
    root.set_path(path, cls.params())


def _grow(root: Params, path: str, index: int, count: int) -> None:
    """Extends the list at `path` so that it has element `index`; each element has a line."""
    if index >= count:
        raise UserError(f"element {index} of a list was not expected in a file of {count} lines")
    values = root.get(path)
    values = list(values) if isinstance(values, (list, tuple)) else []
    root.set_path(path, values + [None] * (index + 1 - len(values)))


def _parse(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    if not _DOTTED.fullmatch(text):
        raise UserError(
            f"{text[:_SHOWN]!r} is neither a literal nor the name of a class or function"
        )
    return registry.defined(text)
