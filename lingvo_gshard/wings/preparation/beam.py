"""Runs the tasks of a preparation as Apache Beam pipelines; needs the extra `beam`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from lingvo_gshard.core import SILENT, UserError
from lingvo_gshard.wings.preparation.job import Job, Task
from lingvo_gshard.wings.preparation.pool import Report

if TYPE_CHECKING:
    import apache_beam as beam

# An error of the user is recorded, since runners would repeat a task that raises it.
_MISTAKE = "{}-mistake"


class _Mistake(msgspec.Struct):
    """Why a task refuses its input."""

    text: str


class BeamPool(contextlib.AbstractContextManager["BeamPool"]):
    """Runs the tasks of each stage as one pipeline of Apache Beam, on any of its runners.

    Workers read and write the job's work directory, so it must be on a file system that all of
    them share. The records there say what is done, as for processes of one machine.
    """

    def __init__(self, job: Job, options: Sequence[str]):
        """Prepares to run pipelines with Beam's options; UserError without Apache Beam."""
        try:
            import apache_beam  # noqa: F401
        except ImportError:
            raise UserError(
                "`beam` needs the package apache-beam: pip install apache-beam in an "
                "environment of its own"
            ) from None
        self._job, self._options = job, list(options)

    def __exit__(self, *_: object) -> None:
        """Does nothing, since a pipeline ends with its stage."""

    def run(self, tasks: Sequence[Task], kind: type, report: Report) -> Iterator[tuple[Task, Any]]:
        """Yields each task with its record, once all are done; UserError if one is refused."""
        import apache_beam as beam

        work = self._job.work
        for task in tasks:
            work.forget(_MISTAKE.format(task.name))
        with self._pipeline() as pipeline:
            _ = (
                pipeline
                | "Tasks" >> beam.Create(tasks)
                | "Spread" >> beam.Reshuffle()
                | "Work" >> beam.Map(_perform, self._job)
            )
        for task in tasks:
            record = work.record(task.name, kind)
            if record is None:
                mistake = work.record(_MISTAKE.format(task.name), _Mistake)
                raise UserError(mistake.text if mistake else f"{task.name} has left no record")
            report(0, task.rows)
            yield task, record

    def _pipeline(self) -> beam.Pipeline:
        """Returns an empty pipeline; UserError if Beam refuses an option."""
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions

        try:
            return beam.Pipeline(options=PipelineOptions(self._options))
        except ValueError as error:
            raise UserError(f"`beam`: {error}") from error


def _perform(task: Task, job: Job) -> str:
    """Does a task and records what became of it. Repeated attempts write the same."""
    try:
        # Runners show how many tasks are done.
        job.work.finish(task.name, task.run(job, SILENT))
    except (UserError, OSError) as error:
        job.work.finish(_MISTAKE.format(task.name), _Mistake(str(error)))
    return task.name
