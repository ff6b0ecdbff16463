"""RunReport: what a report says about one run and its routers, read from its directory."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

import msgspec
import numpy as np

from lingvo_gshard.core import UserError, is_bucket, names, objects, stores, whole_number
from lingvo_gshard.training import METRICS_FILE, Logdir
from lingvo_gshard.wings.pages import html_page
from lingvo_gshard.wings.profiling.comparison import Comparison
from lingvo_gshard.wings.profiling.files import COMPARISON, FOLDER, SUMMARY
from lingvo_gshard.wings.profiling.profile import Profile
from lingvo_gshard.wings.reporting import curves
from lingvo_gshard.wings.reporting.curves import History, Recompilation, RecordedCompilation
from lingvo_gshard.wings.services import run_records
from lingvo_gshard.wings.services.compilations import COMPILATIONS_FILE
from lingvo_gshard.wings.services.roll_back import ROLL_BACKS_FILE, RollBack
from lingvo_gshard.wings.services.routers.router_records import RouterRecord, routers_of_run
from lingvo_gshard.wings.services.run_records import EvaluationRow, Launch, Sharding

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
      router: name of the router's class.
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
    sums = [np.sum([record.choices for record in group], axis=0) for group in groups]
    even = np.log(newest.num_experts) or 1.0
    return RouterPicture(
        layer=newest.layer,
        router=newest.router,
        experts=newest.num_experts,
        experts_in_row=rows,
        steps=[group[-1].step for group in groups],
        load=_rounded(_rows_of([_over_even(choices) for choices in sums], rows).T),
        dropped_share=[_mean([r.dropped_share for r in group]) or 0.0 for group in groups],
        load_entropy=[_mean([r.load_entropy / even for r in group]) or 0.0 for group in groups],
        balance_distance=[_mean([r.balance_distance for r in group]) for group in groups],
        dead=[len(group[-1].dead_since) for group in groups],
        by_language=_shares([r.by_language for r in groups[-1]], rows),
        by_class=_shares([r.by_class for r in groups[-1]], rows),
    )


def _over_even(choices: np.ndarray) -> np.ndarray:
    """Returns [E]: each expert's share of the choices, over an even share."""
    return choices / max(choices.sum(), 1) * choices.size


def _rows_of(columns: Sequence[np.ndarray], experts_in_row: int) -> np.ndarray:
    """Returns [steps, rows]: means over neighboring experts."""
    load = np.stack(columns)
    edges = range(0, load.shape[1], experts_in_row)
    return np.stack([load[:, e : e + experts_in_row].mean(1) for e in edges], axis=1)


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


# More rows of layers than these are only in the profile's own file.
_MOST_LAYERS = 60


class ProfileReport(msgspec.Struct, frozen=True):
    """One profile of a run.

    Attributes:
      path: its folder, within the run's directory.
      profile: where the time went; the layers that took the most time.
      comparison: predicted and measured time; None without a plan.
    """

    path: str
    profile: Profile
    comparison: Comparison | None


def read_profiles(logdir: pathlib.Path) -> list[ProfileReport]:
    """Returns the profiles of a run, the first steps first. Damaged ones are left out."""
    found = []
    for path in (logdir / FOLDER).glob(f"plugins/profile/*/{SUMMARY}"):
        profile = run_records.read_record(path, Profile)
        if profile is None:
            continue
        compared = run_records.read_record(path.with_name(COMPARISON), Comparison)
        short = msgspec.structs.replace(profile, layers=profile.layers[:_MOST_LAYERS])
        if compared:
            layers = compared.layers[:_MOST_LAYERS]
            compared = msgspec.structs.replace(compared, layers=layers)
        found.append(ProfileReport(str(path.parent.relative_to(logdir)), short, compared))
    return sorted(found, key=lambda row: row.profile.first_step)


# More runs than these are not named in an error.
_MOST_NAMED = 5


class Mesh(msgspec.Struct, frozen=True):
    """A mesh, and how each tensor of a `Sharding` is split over it.

    Attributes:
      axes: (name, size) of each axis.
      splits: for each tensor, the axes of each dimension; or, as text, why it cannot be drawn.
    """

    axes: list[tuple[str, int]]
    splits: list[list[list[str]] | str]


class RunReport(msgspec.Struct, frozen=True):
    """The part of a report on one run.

    Attributes:
      logdir: the run's directory, as it was given.
      label: a short name that no other run of the report has.
      steps: `run.steps`, the step to end with; None if params.txt does not say.
      params: path -> value of every hyperparameter, as text.
      launches: how it was started and resumed; empty if that was not recorded.
      recompilations: training steps that were compiled in the middle of the run.
      roll_backs: where it went back to a checkpoint because spikes persisted.
      evaluations: what gshard-evaluate said of it.
      sharding: how its weights and moments are stored; None if that was not recorded.
      mesh: how they lie on the mesh.
      routers: pictures of its routers; empty if they were not watched.
      profiles: where the time of profiled steps went.
    """

    logdir: str
    label: str
    experiment: str
    steps: int | None
    params: dict[str, str]
    history: History
    launches: list[Launch]
    programs: list[RecordedCompilation]
    recompilations: list[Recompilation]
    roll_backs: list[RollBack]
    evaluations: list[EvaluationRow]
    sharding: Sharding | None
    mesh: Mesh | None
    routers: list[RouterPicture]
    profiles: list[ProfileReport]


def read_run(logdir: str | os.PathLike, label: str, points: int, layer_points: int) -> RunReport:
    """Returns the report of a run, which may still be training.

    Args:
      points: number of points of a curve of the whole model, at most.
      layer_points: number of points of all curves of layers together.

    Raises:
      UserError: names `logdir` if the directory holds no run, or a run without metrics.
    """
    given = os.fspath(logdir)
    check_run(given)
    found = Logdir(given)
    path = found.path
    history = curves.read_history(path / METRICS_FILE, points, layer_points)
    params = found.params_as_text()
    experiment = params.get("name", "").strip("'\"")
    if history is None:
        raise UserError(
            f"`logdir={given}`: the run of {experiment or 'an experiment'} has no metrics yet: "
            f"{METRICS_FILE} has no row"
        )
    launches = run_records.read_launches(path)
    programs = run_records.read_rows(path / COMPILATIONS_FILE, RecordedCompilation)
    split = run_records.read_sharding(path)
    return RunReport(
        logdir=given,
        label=label,
        experiment=experiment,
        steps=whole_number(params.get("run.steps", "")),
        params=params,
        history=history,
        launches=launches,
        programs=programs,
        recompilations=curves.recompilations(programs, launches),
        roll_backs=run_records.read_rows(path / ROLL_BACKS_FILE, RollBack),
        evaluations=run_records.read_evaluations(path),
        sharding=split,
        mesh=_mesh(split) if split else None,
        routers=read_pictures(path),
        profiles=read_profiles(path),
    )


def check_run(logdir: str) -> None:
    """Raises ValueError naming `logdir` if there is no run in a directory."""
    found = Logdir(logdir)
    path = stores.path_of(logdir)
    advice = f"Train one first: gshard-train --experiment=NAME --logdir={logdir}"
    if not is_bucket(logdir) and path.exists() and not path.is_dir():
        raise UserError(f"`logdir={logdir}` is a file; the directory of a run was expected")
    if not found.exists():
        near = names.nearest(path.name, _runs_in(path.parent))
        hint = f"{near} " if near.startswith("Did") else ""
        raise UserError(f"`logdir={logdir}`: there is no such directory. {hint}{advice}")
    if found.has_params() or found.has_checkpoints():
        return
    inside = _runs_in(path)
    if inside:
        shown = ", ".join(str(path / name) for name in inside[:_MOST_NAMED])
        more = " and others" if len(inside) > _MOST_NAMED else ""
        raise UserError(
            f"`logdir={logdir}`: it is no run, but a directory with runs: {shown}{more}. Name one "
            "or several of them"
        )
    raise UserError(f"`logdir={logdir}`: there is no run in it (no params.txt). {advice}")


def _runs_in(directory: pathlib.Path) -> list[str]:
    try:
        inside = objects.names(directory)
        return [name for name in inside if objects.is_file(directory / name / "params.txt")]
    except OSError:
        return []


def _mesh(split: Sharding) -> Mesh | None:
    """Returns how tensors lie on the mesh; None if the mesh cannot be read."""
    try:
        found = html_page.describe(split.mesh, split.devices, split.tensors)
    except UserError:
        return None
    return msgspec.convert(found, Mesh)
