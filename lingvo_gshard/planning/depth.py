"""Plans of deep models from plans of two shallow ones.

Decoding programs have no loop over layers, since every layer has arrays of its own. Their compile
time grows with depth. Layers of one kind are equal, so each adds the same operations and bytes: a
plan is linear in the number of layers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

import msgspec

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.planning.plan.plan import CollectiveRow, LayerRow, Plan, TemporaryRow

_Record = TypeVar("_Record", bound=msgspec.Struct)
# Numbers that say which operations a row is about, or what one array is.
_KEPT: dict[type, tuple[str, ...]] = {
    CollectiveRow: ("bytes",),
    LayerRow: ("times",),
    TemporaryRow: ("bytes",),
}


@dataclasses.dataclass(frozen=True)
class Depths:
    """The depths to plan in place of a model's own.

    Attributes:
      shallow: number of layers of the first model: those at the start that differ, and one period.
      deeper: the same with two periods.
      layers: the model's own number of layers.
    """

    shallow: int
    deeper: int
    layers: int

    @classmethod
    def of(cls, decoder: Params) -> Depths | None:
        """Returns the depths for a stack; None if it has no more layers than two periods.

        Args:
          decoder: Params of a TransformerStack.
        """
        layers = decoder.num_layers
        period = math.lcm(max(decoder.moe_every, 1), len(decoder.attention_pattern) or 1)
        first = max(decoder.dense_first, decoder.sequential_first)
        # Layers stand in the same places of their period as in the whole model.
        deeper = first + (layers - first) % period + 2 * period
        return cls(deeper - period, deeper, layers) if deeper < layers else None

    @property
    def steps(self) -> float:
        """The number of layers beyond the first depth, in differences of the two depths."""
        return (self.layers - self.shallow) / (self.deeper - self.shallow)

    def extrapolated(self, first: Plan, second: Plan) -> Plan:
        """Returns the plan of all layers, extrapolated from the plans of the two depths."""
        found = _extrapolated(first, second, self.steps)
        memory = found.bytes_per_device
        return msgspec.structs.replace(
            found,
            fits=memory.peak <= memory.capacity,
            collectives=_with_shares(found.collectives),
            compile_seconds=first.compile_seconds + second.compile_seconds,
            steps_per_second=1 / found.seconds_per_step,
            steps_per_second_bound=1 / found.seconds_per_step_bound,
            tokens_per_second=(found.tokens_per_step or 0) / found.seconds_per_step,
            mfu=_utilization(second) * found.flops.useful / found.seconds_per_step,
            notes=[
                f"extrapolated to {self.layers} layers from programs of {self.shallow} and of "
                f"{self.deeper} layers",
                *second.notes,
            ],
        )


def _utilization(plan: Plan) -> float:
    """Returns the MFU of one useful operation per second."""
    return (plan.mfu or 0.0) * plan.seconds_per_step / max(plan.flops.useful, 1)


def _extrapolated(first: _Record, second: _Record, steps: float) -> _Record:
    """Extrapolates the numbers of a record: first + steps * (second - first)."""
    kept = _KEPT.get(type(second), ())
    changes = {
        name: _value(getattr(first, name), getattr(second, name), steps)
        for name in second.__struct_fields__
        if name not in kept
    }
    return msgspec.structs.replace(second, **changes)


def _value(first: Any, second: Any, steps: float) -> Any:
    if isinstance(second, bool) or type(first) is not type(second):
        return second
    if isinstance(second, int):
        return round(first + steps * (second - first))
    if isinstance(second, float):
        return first + steps * (second - first)
    if isinstance(second, msgspec.Struct):
        return _extrapolated(first, second, steps)
    if isinstance(second, list) and second and isinstance(second[0], msgspec.Struct):
        return _rows(first, second, steps)
    return second


def _rows(first: list[Any], second: list[Any], steps: float) -> list[Any]:
    """Returns the rows of the second list, each extrapolated from the same row of the first."""
    before = {_identity(row): row for row in first}
    return [
        _extrapolated(before.get(_identity(row), _without_calls(row)), row, steps) for row in second
    ]


def _identity(row: msgspec.Struct) -> tuple:
    """Returns what rows about the same operations share: their texts, and numbers of `_KEPT`."""
    kept = _KEPT.get(type(row), ())
    values = {name: getattr(row, name) for name in row.__struct_fields__}
    return tuple(v for name, v in values.items() if isinstance(v, str) or name in kept)


def _without_calls(row: msgspec.Struct) -> msgspec.Struct:
    """Returns a row of operations that a program lacks."""
    kept = _KEPT.get(type(row), ())
    values = {name: getattr(row, name) for name in row.__struct_fields__ if name not in kept}
    zeros = {name: type(v)(0) for name, v in values.items() if isinstance(v, int | float)}
    return msgspec.structs.replace(row, **zeros)


def _with_shares(rows: list[CollectiveRow]) -> list[CollectiveRow]:
    """Returns rows with their parts of the bound of all of them."""
    total = sum(row.seconds_bound for row in rows)
    return [
        msgspec.structs.replace(row, share=row.seconds_bound / total if total else 0.0)
        for row in rows
    ]
