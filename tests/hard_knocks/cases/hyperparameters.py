"""Hyperparameters: names, values and classes that are wrong."""

from tests.hard_knocks.case import Case

_QUICKSTART = "gshard-train --experiment=translation.quickstart --logdir=run --gin_param="

CASES = (
    Case(
        "a negative size",
        _QUICKSTART + "'task.model_dim = -1'",
        error="--gin_param 'task.model_dim = -1': task.model_dim is -1; expected a whole number of "
        "1 or more",
    ),
    Case(
        "a name that is elsewhere in the tree",
        _QUICKSTART + "'task.dropout = 0.1'",
        error="--gin_param 'task.dropout = 0.1': unknown name 'task.dropout'. Did you mean one of "
        "...task.encoder.residual_dropout_rate...?",
    ),
    Case(
        "a class without Params",
        _QUICKSTART + "'trainer.optimizer = @collections.OrderedDict'",
        error="...trainer.optimizer: expected a configurable class, such as "
        "@lingvo_gshard.training.optim.adam.Adam; got OrderedDict, which has no Params",
    ),
    Case(
        "a module that is not here",
        _QUICKSTART + "'trainer.optimizer = @mine.Optimizer'",
        error="...@mine.Optimizer cannot be imported (No module named 'mine'); expected "
        "@package.module.Class, where the package is installed, in the current directory or on "
        "PYTHONPATH",
    ),
    Case(
        "an experiment whose module is not here",
        "gshard-train --experiment=mine.small --logdir=run",
        error="Unknown experiment 'mine.small'. The module mine is neither installed nor in the "
        "current directory nor on PYTHONPATH...",
    ),
    Case(
        "a pattern that no path matches",
        "gshard-train --experiment=translation.quickstart --params=dropuot",
        error="--params=dropuot: no hyperparameter matches. Did you mean 'dropout_rate'?",
    ),
    Case(
        "the hyperparameters of a pattern",
        "gshard-train --experiment=translation.quickstart --params=clip_norm",
        prints=("# Largest global norm", "trainer.clip_norm = 1.0"),
    ),
)
