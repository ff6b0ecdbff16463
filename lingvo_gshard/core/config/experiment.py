"""Experiment: the root of the Params tree; everything a run is."""

from lingvo_gshard.core.config.params import Configurable, Params


class Experiment(Configurable):
    """A task, the input it learns from, and the trainer that drives it."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("name", "", "The experiment's registered name.")
        p.define("task", None, "Params of the task: the model with its loss.")
        p.define("input", None, "Params of the input.")
        p.define("trainer", None, "Params of the trainer.")
        p.define("sharding", _sharding_params(), "What is split, and over which devices.")
        return p


def _sharding_params() -> Params:
    p = Params()
    p.define("mesh", "", "Axes and sizes, such as 'data=4,model=2', where --mesh gives none.")
    p.define("strategy", "", "Name or table of a strategy, where --strategy gives none.")
    p.define("overrides", {}, "Path of a layer, with wildcards -> table, such as 'H->model'.")
    return p
