"""Experiment: the root of the Params tree, which describes a run completely."""

from lingvo_gshard.core.config.params import Configurable, Params


class Experiment(Configurable):
    """A task, its input, and its trainer."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("name", "", "The experiment's registered name.")
        p.define("task", None, "Params of the task: the model with its loss.")
        p.define("input", None, "Params of the input.")
        p.define("trainer", None, "Params of the trainer.")
        p.define("sharding", _sharding_params(), "The default mesh and strategy.")
        return p


def _sharding_params() -> Params:
    p = Params()
    p.define("mesh", "", "Axes and sizes, such as 'data=4,model=2'. An option `mesh` overrides it.")
    p.define("strategy", "", "Name or table of a strategy. An option `strategy` overrides it.")
    p.define(
        "overrides",
        {},
        "Strategies of single layers: path with wildcards -> table, such as 'H->model'.",
    )
    return p
