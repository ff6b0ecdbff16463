"""Report: what is known of one run, or of several to compare them."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

import msgspec

from lingvo_gshard.core import UserError, is_bucket
from lingvo_gshard.sharding import layer_of
from lingvo_gshard.wings.reporting.run import RunReport, read_run
from lingvo_gshard.wings.services.run_records import Sharding

# Points of a curve in all runs together: no more than a screen shows.
_POINTS, _FEWEST = 600, 120
# Points of all curves of layers in all runs together, which keep a page small.
_LAYER_POINTS = 18_000
# More runs than these cannot be told apart by color.
MOST_RUNS = 8


class ParamsDifference(msgspec.Struct, frozen=True):
    """A hyperparameter with different values in the runs, as text; None where it is missing."""

    path: str
    values: list[str | None]


class LayerBytes(msgspec.Struct, frozen=True):
    """The bytes of a layer on one device.

    Attributes:
      layer: path of the layer, such as `encoder.layers[1]`.
      moments: bytes of the optimizer's moments of these weights on one device.
      bytes: bytes of weights and moments on all devices; a part that several devices hold counts
        once.
    """

    layer: str
    weights: int
    moments: int
    bytes: int


class Report(msgspec.Struct, frozen=True):
    """A report on some runs in the caller's order, with the bytes of each run's layers."""

    runs: list[RunReport]
    differences: list[ParamsDifference]
    layers: list[list[LayerBytes]]


def read_report(logdirs: Sequence[str | os.PathLike]) -> Report:
    """Returns the report of the runs in these directories.

    The runs may still be training.

    Raises:
      UserError: names `logdir`: a directory holds no run or one without metrics, is named twice,
        or there are too many.
    """
    given = [os.fspath(logdir) for logdir in logdirs]
    if not given:
        raise UserError("`logdir` is missing: the directory that gshard-train wrote")
    if len(given) > MOST_RUNS:
        raise UserError(f"`logdir` names {len(given)} runs; {MOST_RUNS} at most can be compared")
    places = [logdir if is_bucket(logdir) else os.path.realpath(logdir) for logdir in given]
    for place, logdir in zip(places, given, strict=True):
        if places.count(place) > 1:
            raise UserError(f"`logdir={logdir}` is named twice")
    points = max(_POINTS // len(given), _FEWEST)
    layer_points = _LAYER_POINTS // len(given)
    runs = [
        read_run(logdir, label, points, layer_points)
        for logdir, label in zip(given, labels(places), strict=True)
    ]
    layers = [bytes_by_layer(run.sharding) if run.sharding else [] for run in runs]
    return Report(runs, differences([run.params for run in runs]), layers)


def labels(paths: Sequence[str]) -> list[str]:
    """Shortens paths to their last parts: as few parts as keep all paths different."""
    parts = [pathlib.Path(path).parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-count:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    return list(paths)


def differences(params: Sequence[dict[str, str]]) -> list[ParamsDifference]:
    """Returns the hyperparameters with different values in the runs, sorted by path."""
    paths = sorted(set().union(*params))
    rows = [ParamsDifference(path, [one.get(path) for one in params]) for path in paths]
    return [row for row in rows if len(set(row.values)) > 1]


def bytes_by_layer(sharding: Sharding) -> list[LayerBytes]:
    """Returns the bytes of each layer, in the order of the tensors."""
    sums: dict[str, list[int]] = {}
    for row in sharding.tensors:
        total = sums.setdefault(layer_of(row.path), [0, 0, 0])
        total[row.kind == "moments"] += row.bytes_per_device
        total[2] += row.bytes
    return [LayerBytes(layer, *total) for layer, total in sums.items()]
