"""Reads the loads of routers from files and validates them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.training.run.routers.records import RouterRecord

_EXPECTED = (
    "expected a file that gshard-experts report --json or gshard-experts watched --json wrote, or "
    "the routers.jsonl of a run"
)


class _Use(msgspec.Struct):
    """The use of a layer's experts for the rows of all languages, in a report."""

    tokens: int
    load: list[float]
    dropped_share: float


class _Layer(msgspec.Struct):
    """A layer of a report."""

    path: str
    all: _Use


class _Report(msgspec.Struct):
    """The part of the output of `gshard-experts report --json` that plans read."""

    step: int
    layers: list[_Layer]
    watched: list[RouterRecord] = []


@dataclasses.dataclass(frozen=True)
class Loads:
    """The loads of a model's routers in several steps.

    Attributes:
      path: the file.
      layers: path of a layer -> its records, one for each step, in the order of steps. All layers
        have the same steps.
      is_measured: whether the loads are those of test rows and not of training steps. There is then
        one record, without positions and parts.
    """

    path: str
    layers: dict[str, list[RouterRecord]]
    is_measured: bool = False

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps."""
        return [record.step for record in next(iter(self.layers.values()))]


def load(path: str, first_step: int = 0) -> Loads:
    """Returns the loads in a file.

    Args:
      path: a file of `gshard-experts report --json` or `gshard-experts watched --json`, or the
        routers.jsonl of a run.
      first_step: leaves out the steps before this one.

    Raises:
      UserError: names the flag, the file and the reason if the file is missing, is of another
        kind, has loads that cannot be, or has no steps from `first_step` on.
    """
    try:
        content = pathlib.Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"`loads={path}`: cannot be read: {error.strerror}") from None
    try:
        records, is_measured = _decoded(content)
    except msgspec.ValidationError as error:
        raise UserError(f"`loads={path}`: no loads of routers: {error}; {_EXPECTED}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"`loads={path}`: not JSON ({error}); {_EXPECTED}") from None
    if not records:
        raise UserError(f"`loads={path}`: no layer with experts is in it; {_EXPECTED}")
    for record in records:
        _check_record(path, record)
    return _from_step(Loads(path, _by_layer(path, records), is_measured), first_step)


def _decoded(content: bytes) -> tuple[Sequence[RouterRecord], bool]:
    """Returns the records, and whether they are of test rows."""
    start = content.lstrip()[:1]
    if start == b"[":
        return msgspec.json.decode(content, type=list[RouterRecord]), False
    lines = content.splitlines()
    if len(lines) > 1 and _is_json(lines[0]):
        # A run that goes on may be writing its last line.
        complete = content[: content.rfind(b"\n") + 1]
        return msgspec.json.Decoder(RouterRecord).decode_lines(complete), False
    found = msgspec.json.decode(content)
    if isinstance(found, dict) and "choices" in found:
        return [msgspec.convert(found, RouterRecord)], False
    report = msgspec.convert(found, _Report)
    if report.watched:
        return report.watched, False
    return [_of_report(layer, report.step) for layer in report.layers], True


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except msgspec.DecodeError:
        return False
    return True


def _of_report(layer: _Layer, step: int) -> RouterRecord:
    """Returns the load of a layer for test rows. The experts of a token are unknown: 0."""
    kept = [round(count) for count in layer.all.load]
    return RouterRecord(
        step=step,
        layer=layer.path,
        router="",
        experts_per_token=0.0,
        tokens=layer.all.tokens,
        choices=kept,
        kept=kept,
        dropped_share=layer.all.dropped_share,
        load_entropy=0.0,
    )


def _check_record(path: str, record: RouterRecord) -> None:
    """Raises ValueError if a record's counts cannot be."""
    where = f"`loads={path}`: {record.layer}, step {record.step:,}"
    width = len(record.choices)
    if not width:
        raise UserError(f"{where}: choices is empty; expected a count for each expert")
    counts = {"choices": record.choices, "kept": record.kept, "positions": record.positions}
    counts |= {f"by_part[{i}]": part for i, part in enumerate(record.by_part)}
    for name, values in counts.items():
        negative = np.flatnonzero(np.asarray(values) < 0)
        if negative.size:
            raise UserError(
                f"{where}: {name}[{negative[0]}] is {values[negative[0]]:,}; expected a count, 0 "
                "or more"
            )
        if name != "positions" and len(values) != width:
            raise UserError(
                f"{where}: {name} has {len(values)} counts and choices has {width}; expected one "
                "for each expert"
            )
    if not sum(record.choices):
        raise UserError(f"{where}: no token chose an expert; expected a count above 0")
    if record.by_part and np.any(np.sum(record.by_part, 0) != record.choices):
        raise UserError(f"{where}: by_part does not add up to choices, as it does in such a file")


def _by_layer(path: str, records: Iterable[RouterRecord]) -> dict[str, list[RouterRecord]]:
    """Returns the records of each layer, in the order of steps; the last one of a step counts."""
    found: dict[str, dict[int, RouterRecord]] = {}
    for record in records:
        found.setdefault(record.layer, {})[record.step] = record
    first = next(iter(found))
    for layer, by_step in found.items():
        missing = sorted(set(found[first]) ^ set(by_step))
        if missing:
            raise UserError(
                f"`loads={path}`: only one of {first} and {layer} has a record of step "
                f"{missing[0]:,}; expected the same steps of all layers"
            )
        widths = {len(record.choices) for record in by_step.values()}
        if len(widths) > 1:
            raise UserError(
                f"`loads={path}`: {layer} has {min(widths)} experts in one step and {max(widths)} "
                "in another; expected the loads of one model"
            )
    return {layer: [by_step[s] for s in sorted(by_step)] for layer, by_step in found.items()}


def _from_step(loads: Loads, first_step: int) -> Loads:
    """Returns the loads without the steps before one."""
    last_step = loads.steps[-1]
    if first_step > last_step:
        raise UserError(
            f"`loads_from={first_step}`: the last step in `loads={loads.path}` is {last_step:,}; "
            "expected a smaller number"
        )
    layers = {
        layer: [record for record in records if record.step >= first_step]
        for layer, records in loads.layers.items()
    }
    return dataclasses.replace(loads, layers=layers)
