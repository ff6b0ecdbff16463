"""The options of a run: length, output and monitoring."""

from __future__ import annotations

from lingvo_gshard.core import Configurable, Params, Seam


class ServiceOptions:
    """Options that a service adds to `run`."""

    @classmethod
    def define(cls, p: Params) -> None:
        """Adds the hyperparameters."""
        raise NotImplementedError(f"{cls.__name__} defines no options")

    @classmethod
    def check(cls, p: Params) -> None:
        """Raises UserError if the options contradict each other."""
        del p


# The options of services, by service.
SERVICE_OPTIONS: Seam[type[ServiceOptions]] = Seam("service_options")


class RunOptions(Configurable):
    """The options of a run, `run`. All may change when it resumes."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("steps", 1000, "Steps to train, those of earlier runs included.", minimum=1)
        p.define("log_every_steps", 50, "Steps between log lines and points of curves.", minimum=1)
        p.define(
            "checkpoint_every_steps", 1000, "Steps between checkpoints; 0: at the end.", minimum=0
        )
        p.define("keep_checkpoints", 3, "Number of checkpoints to keep.", minimum=1)
        p.define("evaluate_every_steps", 0, "Steps between dev losses; 0: at the end.", minimum=0)
        p.define("save_seconds", 1800.0, "Longest time a step waits for a checkpoint.", above=0)
        for options in SERVICE_OPTIONS:
            options.define(p)
        return p

    def __init__(self, params: Params):
        """Checks the options of a run.

        Raises:
          UserError: they contradict each other.
        """
        super().__init__(params)
        for options in SERVICE_OPTIONS:
            options.check(params)
