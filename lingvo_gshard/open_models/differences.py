"""Differences between a model and the families of published models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.open_models.config import CONFIG_FILE, PublishedConfig
from lingvo_gshard.open_models.families import FAMILIES, Family
from lingvo_gshard.tasks.language_model import LanguageModelTask
from lingvo_gshard.tasks.translation import TranslationTask

# (path of a hyperparameter, its value, its value in the other model).
_Difference = tuple[str, str, str]

# More differences than any described model has.
_MANY = 1000
_MOST_SHOWN = 12
_STACKS = ("encoder", "decoder")
# Params that do not change what a trained model computes.
_FREE = frozenset(
    (
        "attention_dropout_rate",
        "auxiliary_loss_weight",
        "capacity_factor",
        "dropout_rate",
        "dtype",
        "fprop_dtype",
        "group_size",
        "input_dropout_rate",
        "jitter",
        "label_smoothing",
        "most_source",
        "residual_dropout_rate",
        "token_dropout_rate",
        "z_loss_weight",
    )
)
_FREE_NODES = frozenset(("execution", "lora"))


def check_same_task(task: Params, family: Family, config: PublishedConfig) -> None:
    """Raises ValueError, naming Params, if a config does not describe a task."""
    rows = _differences(task, family.task_of(config))
    if rows:
        raise UserError(
            f"{CONFIG_FILE} of {family.architecture} cannot describe this model: {_listed(rows)}"
        )


def why_none_fits(task: Params) -> str:
    """Returns why a model fits no family: how it differs from the nearest one.

    Args:
      task: Params of the task, with the sizes of vocabularies filled in.
    """
    cls: Any = task.cls
    if not issubclass(cls, (LanguageModelTask, TranslationTask)):
        return (
            f"its task is {cls.__name__}, and the families ({', '.join(FAMILIES)}) are "
            "language models and translation models"
        )
    found = [(_differences_to(task, family), family) for family in FAMILIES.values()]
    rows, nearest = min(found, key=lambda pair: _distance(pair[0]))
    differs = _listed(rows) if rows else "its vocabulary was trained here"
    return f"the nearest is {nearest.architecture}, but {differs}"


def _distance(rows: list[_Difference]) -> tuple[bool, int]:
    """Returns a measure of differences. A model without experts is far from one with experts."""
    no_experts = any(path.endswith(".moe_every") and "0" in both for path, *both in rows)
    return no_experts, len(rows)


def _differences_to(task: Params, family: Family) -> list[_Difference]:
    """Returns how a task differs from the one that a family's nearest config describes."""
    try:
        described = family.task_of(PublishedConfig(family.config_of(task), CONFIG_FILE))
    except (AttributeError, ValueError, StopIteration):
        # The family's config cannot describe a part of this model, such as the kind of router.
        return [("decoder", "made of other parts", family.architecture)] * _MANY
    return _differences(task, described)


def _differences(task: Params, described: Params) -> list[_Difference]:
    """Returns the differences that change what a trained model computes."""
    rows = task.diff(described)
    classes = tuple(path.removesuffix("cls") for path, _, _ in rows if path.endswith(".cls"))
    unused = tuple(_unused(task, described))
    return [
        row
        for row in rows
        if row[0].rpartition(".")[2] not in _FREE
        and _FREE_NODES.isdisjoint(row[0].split("."))
        and not row[0].startswith(unused)
        # A class's own parts are no further difference.
        and (row[0].endswith(".cls") or not row[0].startswith(classes))
    ]


def _unused(task: Params, described: Params) -> Iterator[str]:
    """Yields the beginnings of paths that at least one of the two models does not use."""
    for name in _STACKS:
        stacks = [each.get(name) for each in (task, described) if name in each]
        if not all(stack.is_decoder for stack in stacks):
            yield f"{name}.layer.cross_attention."
        if not all(stack.moe_every for stack in stacks):
            yield f"{name}.moe."


def _listed(rows: list[_Difference]) -> str:
    """Returns the differences as text. What both stacks have in common is said once."""
    paths: dict[_Difference, list[str]] = {}
    for path, ours, theirs in rows:
        stack, _, rest = path.partition(".")
        key = (rest, ours, theirs) if stack in _STACKS else (path, ours, theirs)
        paths.setdefault(key, []).append(f"task.{path}")
    found = [
        f"{' and '.join(sorted(same))} {'is' if len(same) == 1 else 'are'} {_short(ours)}, "
        f"there {_short(theirs)}"
        for (_, ours, theirs), same in paths.items()
    ]
    more = f"; and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    return "; ".join(found[:_MOST_SHOWN]) + more


def _short(value: str) -> str:
    """Returns the text of a value, of a class without its module."""
    is_class = value.startswith("lingvo_gshard.")
    return value.rpartition(".")[2] if is_class else value
