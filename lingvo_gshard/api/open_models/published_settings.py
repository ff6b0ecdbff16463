"""Settings of generation that an imported run was published with."""

from __future__ import annotations

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.inference.published_settings import PublishedSettings
from lingvo_gshard.training.run.checkpoint.run_item import read_run
from lingvo_gshard.training.run.checkpoint.steps import steps_in
from lingvo_gshard.training.run.logdir import Logdir


def published_settings(logdir: Logdir, params: Params) -> PublishedSettings:
    """Returns the settings in the newest readable checkpoint; none if it was not imported.

    Args:
      logdir: the run's directory.
      params: the run's Params.
    """
    for step in reversed(steps_in(logdir.checkpoints)):
        try:
            extras = read_run(logdir.checkpoints / str(step)).extras
        except Exception:  # Restoring the checkpoint reports the damage.
            continue
        found = PublishedSettings.read(extras)
        decoding = params.task.cls.DECODING
        if found.fields and decoding is not None and not decoding.has_source:
            return found.within(params.input.length)
        return found
    return PublishedSettings()
