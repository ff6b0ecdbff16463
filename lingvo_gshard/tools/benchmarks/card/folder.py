"""The folder of a step that fills a card: the step, its plan, and how it was chosen."""

from __future__ import annotations

import dataclasses
import pathlib

import msgspec

from lingvo_gshard.core import UserError, atomic, explained, objects
from lingvo_gshard.wings.planning.plan.plan import Plan, load

STEP, PLAN, CARD = "train_step.zip", "plan.json", "card.json"


class CardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of a folder's step.

    Attributes:
      settings: the experiment's settings, as --gin_param takes them.
      grown: the setting that was chosen last, such as "task.decoder.num_layers".
      topology: the card, such as "gpu:h100:1x1".
      memory: bytes of the card.
      share: the most of them that the plan's peak may take.
      options: options of XLA's compiler that the plan was made with.
    """

    experiment: str
    settings: list[str]
    grown: str
    value: int
    topology: str
    memory: int
    share: float
    options: dict[str, str] = {}


@dataclasses.dataclass(frozen=True)
class CardFolder:
    """A step that fills a card, read from its folder: the path of the step, and its plan."""

    step: str
    plan: Plan
    card: CardRecord


def read(folder: str) -> CardFolder:
    """Returns what `gshard-bench fill` wrote. Raises UserError if a file is missing or damaged."""
    path = pathlib.Path(folder)
    missing = [name for name in (STEP, PLAN, CARD) if not (path / name).is_file()]
    if missing:
        raise UserError(
            f"{folder} has no {missing[0]}; gshard-bench fill --folder={folder} writes it"
        )
    with explained(f"{path / CARD} was not written by gshard-bench fill", msgspec.DecodeError):
        card = atomic.decode(objects.read_bytes(path / CARD), CardRecord)
    return CardFolder(str(path / STEP), load(str(path / PLAN)), card)
