"""Experiment: the root of the Params tree, which describes a run completely."""

from lingvo_gshard.core.config.params import Configurable, Params


class Experiment(Configurable):
    """A task, its input, its training step and its run."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("name", "", "The experiment's registered name.")
        p.define("task", None, "Params of the task: the model with its loss.")
        p.define("input", None, "Params of the input.")
        p.define("step", None, "Params of the training step: all that determines its results.")
        p.define("run", None, "Params of the run.", changes_results=False)
        p.define("sharding", _sharding_params(), "The default mesh and strategy.")
        return p


def _sharding_params() -> Params:
    p = Params()
    p.define(
        "mesh",
        "",
        "Axes and sizes, such as 'data=4,model=2'. An option `mesh` overrides it.",
        changes_results=False,
    )
    p.define(
        "strategy",
        "",
        "Name or table of a strategy. An option `strategy` overrides it.",
        changes_results=False,
    )
    p.define(
        "overrides",
        {},
        "Strategies of single layers: path with wildcards -> table, such as 'H->model'.",
        changes_results=False,
    )
    return p
