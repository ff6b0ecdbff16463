"""Limits on how much worse one plan may be than another, as a check of a change under review."""

from __future__ import annotations

import collections
import dataclasses
import operator
import re
from collections.abc import Callable, Mapping

from lingvo_gshard.core.config import names
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.hlo.collectives import KINDS
from lingvo_gshard.planning.plan.plan import ACROSS_SLICES, Plan

EXAMPLE = "peak>+2%,step>+3%,all-gather>0"


# Names of quantities -> their values in a plan, and their unit as in `PlanDifference.unit`.
_QUANTITIES: Mapping[str, tuple[Callable[[Plan], float | None], str]] = {
    "peak": (lambda plan: plan.bytes_per_device.peak, "bytes"),
    "weights": (lambda plan: plan.bytes_per_device.weights, "bytes"),
    "moments": (lambda plan: plan.bytes_per_device.moments, "bytes"),
    "activations": (lambda plan: plan.bytes_per_device.activations, "bytes"),
    "step": (lambda plan: plan.seconds_per_step, "seconds"),
    "bound": (lambda plan: plan.seconds_per_step_bound, "seconds"),
    "tokens_per_second": (lambda plan: plan.tokens_per_second, "rate"),
    "mfu": (lambda plan: plan.mfu, "share"),
    "flops": (lambda plan: plan.flops.executed, "flops"),
    "parameters": (lambda plan: plan.parameters.total if plan.parameters else None, "count"),
    "collectives": (lambda plan: sum(row.count for row in plan.collectives), "count"),
    "across-slices": (lambda plan: _calls_across_slices(plan), "count"),
    **{kind: (lambda plan, kind=kind: _calls(plan)[kind], "count") for kind in KINDS},
}
_COMPARISONS = {">": operator.gt, "<": operator.lt}
_LIMIT = re.compile(r"(?P<name>[\w-]+)\s*(?P<sign>[<>])\s*(?P<amount>[+-]?[\d.]+)\s*(?P<unit>\S*)")
_SCALES = {"": 1.0, "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


@dataclasses.dataclass(frozen=True)
class Limit:
    """A limit on the change of one quantity.

    Attributes:
      text: the limit as it was given, such as "peak>+2%".
      name: the quantity.
      sign: ">" if larger changes exceed the limit, "<" if smaller changes do.
      amount: the change, in the quantity's unit or as a share of the value before.
      is_share: whether the amount is a share.
    """

    text: str
    name: str
    sign: str
    amount: float
    is_share: bool

    def check(self, before: Plan, after: Plan) -> Checked:
        """Returns the quantity in both plans, and whether its change exceeds the limit."""
        value, unit = _QUANTITIES[self.name]
        old, new = value(before), value(after)
        if old is None or new is None:
            return Checked(self, old, new, unit, is_exceeded=(old is None) != (new is None))
        allowed = abs(old) * self.amount if self.is_share else self.amount
        return Checked(self, old, new, unit, _COMPARISONS[self.sign](new - old, allowed))


@dataclasses.dataclass(frozen=True)
class Checked:
    """A limit that was applied to two plans.

    Attributes:
      limit: the limit.
      before: value of the quantity in the first plan; None if the plan has none.
      after: value in the second plan.
      unit: as in `PlanDifference.unit`.
      is_exceeded: whether the change exceeds the limit. A value that only one plan has does.
    """

    limit: Limit
    before: float | None
    after: float | None
    unit: str
    is_exceeded: bool


def parse(text: str, where: str = "`fail_on`") -> list[Limit]:
    """Returns the limits that a text such as "peak>+2%,all-gather>0" lists.

    Each is a quantity, ">" or "<", and the change that exceeds the limit: a number, with a
    unit of bytes or with "%" for a share of the value before.

    Args:
      text: limits, separated by commas.
      where: flag that gives the text, for messages.

    Raises:
      UserError: a limit cannot be read, or its quantity is unknown.
    """
    return [_parse_one(part.strip(), where) for part in text.split(",") if part.strip()]


def _parse_one(part: str, where: str) -> Limit:
    found = _LIMIT.fullmatch(part)
    if not found:
        raise UserError(f"{where}: {part!r} is no limit; expected such as {EXAMPLE}")
    name, sign, amount, unit = found.group("name", "sign", "amount", "unit")
    if name not in _QUANTITIES:
        raise UserError(f"{where}: unknown quantity {name!r}. {names.nearest(name, _QUANTITIES)}")
    of_bytes = _QUANTITIES[name][1] == "bytes"
    if unit != "%" and (unit not in _SCALES or (unit and not of_bytes)):
        units = ", ".join(filter(None, _SCALES)) + " or %" if of_bytes else "none or %"
        raise UserError(f"{where}: {part!r}: unknown unit {unit!r} of {name}; expected {units}")
    try:
        number = float(amount)
    except ValueError:
        raise UserError(f"{where}: {part!r}: {amount} is no number") from None
    scale = 0.01 if unit == "%" else _SCALES[unit]
    return Limit(part, name, sign, number * scale, unit == "%")


def _calls(plan: Plan) -> collections.Counter[str]:
    """Returns the calls of each collective in a step."""
    calls: collections.Counter[str] = collections.Counter()
    for row in plan.collectives:
        calls[row.kind.removesuffix(ACROSS_SLICES)] += row.count
    return calls


def _calls_across_slices(plan: Plan) -> int:
    """Returns the calls of collectives across TPU slices in a step."""
    return sum(row.count for row in plan.collectives if row.kind.endswith(ACROSS_SLICES))
