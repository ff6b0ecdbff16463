"""Experiment: the root of the Params tree; everything a run is."""

from lingvo_gshard.core.params import Configurable, Params


class Experiment(Configurable):
    """A task, the input it learns from, and the trainer that drives it."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("name", "", "The experiment's registered name.")
        p.define("task", None, "Params of the task: the model with its loss.")
        p.define("input", None, "Params of the input.")
        p.define("trainer", None, "Params of the trainer.")
        return p
