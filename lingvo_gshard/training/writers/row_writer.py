"""RowWriter: sends the rows of a run to a service that tracks experiments."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from lingvo_gshard.core.config import names
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files import json_text
from lingvo_gshard.core.files.atomic import replace_file
from lingvo_gshard.training.monitoring.metrics import Row

# Name of a writer -> the package that it needs.
WRITERS = {"wandb": "wandb", "mlflow": "mlflow"}
# The file in a log directory that has each service's id of the run.
WRITERS_FILE = "writers.json"
# The project or experiment that runs are listed under, unless the service's settings name another.
PROJECT = "lingvo_gshard"


class RowWriter(Protocol):
    """Sends rows to one service. Any method may raise an exception of the service.

    Attributes:
      run_id: the service's id of the run.
      place: where people find the run.
    """

    run_id: str
    place: str

    def write(self, step: int, row: Row) -> None:
        """Sends the row of a step, soon."""
        ...

    def flush(self) -> None:
        """Sends rows that wait."""
        ...

    def close(self, is_finished: bool) -> None:
        """Waits until all rows are sent. Tells whether the run ended without an error."""
        ...


class RowWriters:
    """Sends rows to several services. One that fails is left out, and training goes on."""

    def __init__(self, writers: dict[str, RowWriter], say: Callable[[str], None]):
        """Joins the writers.

        Args:
          writers: name -> writer.
          say: shows a line to the user.
        """
        self._writers, self._say = dict(writers), say

    def write(self, step: int, row: Row) -> None:
        """Sends the row of a step."""
        self._call(lambda writer: writer.write(step, row))

    def flush(self) -> None:
        """Sends rows that wait."""
        self._call(lambda writer: writer.flush())

    def close(self, is_finished: bool) -> None:
        """Ends all writers."""
        self._call(lambda writer: writer.close(is_finished))

    def _call(self, call: Callable[[RowWriter], None]) -> None:
        for name, writer in list(self._writers.items()):
            try:
                call(writer)
            except Exception as error:
                # Services fail in many ways, and none of them may end a training run.
                del self._writers[name]
                problem = " ".join(str(error).split())[:300]
                self._say(f"Warning: {name} gets no more rows of this run ({problem})")


def check(chosen: Sequence[str]) -> None:
    """Checks `trainer.writers`.

    Raises:
      UserError: a name is unknown, or its package is not installed.
    """
    if isinstance(chosen, str):
        raise UserError(
            f"trainer.writers is {chosen!r}; expected several names, such as ({chosen!r},)"
        )
    for name in chosen:
        if name not in WRITERS:
            raise UserError(f"`writer={name}` is unknown. {names.nearest(name, WRITERS)}")
        if importlib.util.find_spec(WRITERS[name]) is None:
            raise UserError(
                f"`writer={name}` needs the package {WRITERS[name]}, which is not installed: pip "
                f"install 'lingvo_gshard[{name}]'"
            )


def open_writers(
    chosen: Sequence[str],
    logdir: pathlib.Path,
    params: dict[str, str],
    say: Callable[[str], None],
) -> RowWriters:
    """Returns the writers of a run, which go on with the service's record of a resumed one.

    Args:
      chosen: names of writers.
      logdir: the run's directory.
      params: path -> value of the hyperparameters, which the services show.
      say: shows a line to the user.
    """
    opened: dict[str, RowWriter] = {}
    ids = _read_ids(logdir)
    for name in chosen:
        try:
            writer = _open(name, logdir, params, ids.get(name))
            opened[name], ids[name] = writer, writer.run_id
            say(f"{name} gets the metrics of this run: {writer.place}")
        except Exception as error:
            # As above: an unreachable service is no reason not to train.
            problem = " ".join(str(error).split())[:300]
            say(f"Warning: {name} gets no rows of this run ({problem})")
    if opened:
        _write_ids(logdir, ids, say)
    return RowWriters(opened, say)


def _open(name: str, logdir: pathlib.Path, params: dict[str, str], known: str | None) -> RowWriter:
    """Returns a writer, which goes on with the run that has a known id."""
    if name == "wandb":
        from lingvo_gshard.training.writers.wandb_writer import WandbWriter

        return WandbWriter(logdir, params, known)
    from lingvo_gshard.training.writers.mlflow_writer import MlflowWriter

    return MlflowWriter(logdir, params, known)


def _read_ids(logdir: pathlib.Path) -> dict[str, str]:
    try:
        return json_text.decode((logdir / WRITERS_FILE).read_bytes(), dict[str, str])
    except (OSError, msgspec.DecodeError):
        return {}


def _write_ids(logdir: pathlib.Path, ids: dict[str, str], say: Callable[[str], None]) -> None:
    try:
        replace_file(logdir / WRITERS_FILE, msgspec.json.encode(ids))
    except OSError as error:
        say(f"Warning: {WRITERS_FILE} cannot be written ({error.strerror})")
