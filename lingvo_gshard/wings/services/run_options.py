"""The options of a run's services."""

from __future__ import annotations

from lingvo_gshard.core import Configurable, Params, UserError
from lingvo_gshard.training import SERVICE_OPTIONS, ServiceOptions

# Metrics of the dev split begin so.
DEV = "dev/"
# Arrays of a batch with choices of routers begin so.
CHOICES = "choices/"


@SERVICE_OPTIONS.register("best checkpoint")
class BestCheckpoint(ServiceOptions):
    """The choice of the best checkpoint, and the end of a training without a better one."""

    @classmethod
    def define(cls, p: Params) -> None:
        """Adds `keep_best` and `patience`."""
        p.define(
            "keep_best",
            "",
            "Metric whose best checkpoint is kept and used, such as 'dev/loss'; '': the newest is.",
        )
        p.define(
            "patience",
            0,
            "Evaluations without a better `keep_best` after which training ends; 0: it goes on.",
            minimum=0,
        )

    @classmethod
    def check(cls, p: Params) -> None:
        """Raises UserError if the run has no evaluations to choose from."""
        best = p.keep_best
        if p.patience and not best:
            raise UserError(f"run.patience={p.patience} needs run.keep_best, such as 'dev/loss'")
        if best and not best.startswith(DEV):
            raise UserError(
                f"run.keep_best={best!r}: expected a metric of the dev split, such as 'dev/loss'"
            )
        if best and not p.evaluate_every_steps:
            raise UserError(f"run.keep_best={best!r} needs run.evaluate_every_steps, which is 0")


@SERVICE_OPTIONS.register("choices")
class RouterChoices(ServiceOptions):
    """Defines the options that record and replay the choices of routers."""

    @classmethod
    def define(cls, p: Params) -> None:
        """Adds `record_choices` and `replay_choices`."""
        p.define(
            "record_choices",
            (),
            "(first, last): the steps whose routers' choices are written to the folder `choices` "
            "of the log directory; (): none.",
        )
        p.define(
            "replay_choices", "", "Log directory of a run whose recorded choices its steps take."
        )

    @classmethod
    def check(cls, p: Params) -> None:
        """Raises UserError if the steps to record are not a range."""
        steps = p.record_choices
        is_range = len(steps) == 2 and all(isinstance(step, int) for step in steps)
        if steps and not (is_range and 1 <= steps[0] <= steps[1]):
            raise UserError(
                f"run.record_choices={steps!r}: expected the first and the last step, such as "
                "(1, 10)"
            )


@SERVICE_OPTIONS.register("watches")
class Watches(ServiceOptions):
    """Services that get metrics, watch steps, or check them."""

    @classmethod
    def define(cls, p: Params) -> None:
        """Adds the options of trackers, snapshots, routers, hangs and determinism."""
        p.define("writers", (), "Services that get the metrics as well: 'wandb', 'mlflow'.")
        p.define(
            "snapshot_every_steps",
            0,
            "Steps between snapshots in the memory of the hosts, under gshard-launch; 0: none.",
            minimum=0,
        )
        p.define(
            "keep_programs",
            False,
            "Whether the folder `programs` of the log directory keeps lowered steps, which a run "
            "that resumes does not trace again.",
        )
        p.define("routers", Routers.params(), "How the routers of experts are watched.")
        p.define(
            "hang_factor",
            50.0,
            "The run ends if no step ends within so many times the median step; 0: it never does.",
            minimum=0,
        )
        p.define("hang_seconds", 600.0, "Least number of seconds that are a hang.", above=0)
        p.define(
            "check_determinism_every", 0, "Steps between those computed twice; 0: none.", minimum=0
        )


class Routers(Configurable):
    """The options of watched routers, `run.routers`.

    Every `every_steps` steps the forward pass runs once more, on the same batch, and counts where
    each layer's router sends the tokens. Models without experts are not watched.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "every_steps", 50, "Steps between watched ones; 0: routers are not watched.", minimum=0
        )
        p.define("window", 4, "Watched steps without a token that make an expert dead.", minimum=1)
        p.define(
            "collapse",
            0.6,
            "A router whose busiest experts exceed an even load by this share of what is possible "
            "has collapsed: 0 is an even load, 1 sends all tokens to the same experts.",
            above=0,
            maximum=1,
        )
        return p
