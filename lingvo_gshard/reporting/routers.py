"""Pictures of a run's routers: which share of the choices each expert got, over the steps."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import msgspec
import numpy as np

from lingvo_gshard.training.run.routers.router_records import RouterRecord, routers_of_run

# More watched steps or experts than these are averaged in groups.
_MOST_STEPS, _MOST_EXPERTS = 60, 64


class ExpertShares(msgspec.Struct, frozen=True):
    """The share of the choices that each expert got, of tokens of one kind.

    Attributes:
      name: the language or the class of tokens.
      tokens: number of choices.
      load: [E], each expert's share of them over an even share; 1 is even.
    """

    name: str
    tokens: int
    load: list[float]


class RouterPicture(msgspec.Struct, frozen=True):
    """The picture of one layer's router over the watched steps.

    Attributes:
      layer: path of the layer.
      router: name of the router's class.
      experts: number of experts.
      experts_in_row: number of experts that one row of `load` stands for; 1 unless there are many.
      steps: the watched steps. If a column stands for several steps, the last of these.
      load: for each expert, the expert's share of the choices over an even share, at each of the
        steps.
      dropped_share: share of the choices that found their expert full, at each of the steps.
      load_entropy: entropy of the experts' shares over the entropy of even shares, at each of the
        steps.
      balance_distance: the balance loss over its value under an even load, minus 1.
      dead: number of experts without a token for some time, at each of the steps.
      by_language: shares by language, over the last watched steps.
      by_class: shares by class of token, over the last watched steps.
    """

    layer: str
    router: str
    experts: int
    experts_in_row: int
    steps: list[int]
    load: list[list[float]]
    dropped_share: list[float]
    load_entropy: list[float]
    balance_distance: list[float | None]
    dead: list[int]
    by_language: list[ExpertShares]
    by_class: list[ExpertShares]


def read_pictures(logdir: pathlib.Path) -> list[RouterPicture]:
    """Returns a picture of each router, in the order of the layers; none if none was watched."""
    layers: dict[str, list[RouterRecord]] = {}
    for record in routers_of_run(logdir):
        layers.setdefault(record.layer, []).append(record)
    return [_picture(records) for records in layers.values()]


def _picture(records: Sequence[RouterRecord]) -> RouterPicture:
    newest = records[-1]
    # A run that was started from another number of experts keeps the newest ones.
    records = [r for r in records if r.num_experts == newest.num_experts]
    columns = [list(part) for part in np.array_split(np.arange(len(records)), _MOST_STEPS)]
    groups = [[records[i] for i in column] for column in columns if column]
    rows = -(-newest.num_experts // _MOST_EXPERTS)
    return RouterPicture(
        layer=newest.layer,
        router=newest.router,
        experts=newest.num_experts,
        experts_in_row=rows,
        steps=[group[-1].step for group in groups],
        load=_rounded(_rows_of([_load(group) for group in groups], rows).T),
        dropped_share=[_mean([r.dropped_share for r in group]) or 0.0 for group in groups],
        load_entropy=[_entropy(group) for group in groups],
        balance_distance=[_mean([r.balance_distance for r in group]) for group in groups],
        dead=[len(group[-1].dead_since) for group in groups],
        by_language=_shares([r.by_language for r in groups[-1]], rows),
        by_class=_shares([r.by_class for r in groups[-1]], rows),
    )


def _load(group: Sequence[RouterRecord]) -> np.ndarray:
    """Returns [E]: each expert's share of the choices of some steps, over an even share."""
    return _over_even(np.sum([record.choices for record in group], axis=0))


def _over_even(choices: np.ndarray) -> np.ndarray:
    return choices / max(choices.sum(), 1) * choices.size


def _rows_of(columns: Sequence[np.ndarray], experts_in_row: int) -> np.ndarray:
    """Returns [steps, rows]: means over neighboring experts."""
    load = np.stack(columns)
    edges = range(0, load.shape[1], experts_in_row)
    return np.stack([load[:, e : e + experts_in_row].mean(1) for e in edges], axis=1)


def _entropy(group: Sequence[RouterRecord]) -> float:
    even = np.log(group[-1].num_experts) or 1.0
    return _digits(float(np.mean([record.load_entropy for record in group]) / even))


def _shares(tables: Sequence[dict[str, list[int]]], experts_in_row: int) -> list[ExpertShares]:
    """Returns the shares of each language or class, the most frequent ones first."""
    totals: dict[str, np.ndarray] = {}
    for table in tables:
        for name, choices in table.items():
            totals[name] = totals.get(name, 0) + np.asarray(choices)
    return [
        ExpertShares(
            name, int(sums.sum()), _rounded(_rows_of([_over_even(sums)], experts_in_row))[0]
        )
        for name, sums in sorted(totals.items(), key=lambda item: -item[1].sum())
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _digits(float(np.mean(known))) if known else None


def _rounded(values: np.ndarray) -> list:
    return [[_digits(value) for value in row] for row in values]


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
