"""Hyperparameters: names, values and classes that are wrong."""

from tests.hard_knocks.case import Case
from tests.hard_knocks.prepare import folder, write

_TINY = "gshard-train --logdir=run --experiment=test.tiny "
_TRAIN = "gshard-train --experiment=translation.quickstart --logdir=run "
_QUICKSTART = _TRAIN + "--gin_param="

CASES = (
    Case(
        "a run to start from that is not there",
        "gshard-train --logdir=run --init_from=nowhere",
        error="--init_from=nowhere: ...nowhere holds no run: it has no params.txt",
    ),
    Case(
        "a directory to start from that holds no run",
        _TINY + "--init_from=empty",
        given=(folder("empty"),),
        error="--init_from=empty holds neither a checkpoint of a run nor a published model with "
        "its config.json",
    ),
    Case(
        "adapters of weights that are not there",
        _TINY + "--gin_param='task.lora.rank = 2'",
        error="step: task.lora.weights: no layer or weight is named '*.w_query'. ...",
        changes=("run", "run/*"),
    ),
    Case(
        "adapters of weights that can have none",
        _TINY + "--gin_param='task.lora.rank = 2' --gin_param='task.lora.weights = (\"hidden\",)'",
        error="step: task.lora.weights: 'hidden' matches no weight that activations are "
        "multiplied with. There are none.",
        changes=("run", "run/*"),
    ),
    Case(
        "a negative size",
        _QUICKSTART + "'task.model_dim = -1'",
        error="--gin_param 'task.model_dim = -1': task.model_dim is -1; expected a whole number of "
        "1 or more",
    ),
    Case(
        "a window of no watched step",
        _QUICKSTART + "'run.routers.window = 0'",
        error="--gin_param 'run.routers.window = 0': run.routers.window is 0; expected a "
        "whole number of 1 or more",
    ),
    Case(
        "a name that is elsewhere in the tree",
        _QUICKSTART + "'task.dropout = 0.1'",
        error="--gin_param 'task.dropout = 0.1': unknown name 'task.dropout'. Did you mean one of "
        "...task.encoder.residual_dropout_rate...?",
    ),
    Case(
        "a class without Params",
        _QUICKSTART + "'step.optimizer = @collections.OrderedDict'",
        error="...step.optimizer: expected a configurable class, such as "
        "@lingvo_gshard.wings.optimizers.muon.Muon; got OrderedDict, which has no Params",
    ),
    Case(
        "a module that is not here",
        _QUICKSTART + "'step.optimizer = @mine.Optimizer'",
        error="...@mine.Optimizer cannot be imported (No module named 'mine'); expected "
        "@package.module.Class, where the package is installed, in the current directory or on "
        "PYTHONPATH",
    ),
    Case(
        "a precision by its short name",
        _QUICKSTART + "'step.precision = \"fp16\"'",
        error="step: step.precision is 'fp16'. Did you mean 'float16'?",
    ),
    Case(
        "steps in words",
        _QUICKSTART + "'run.steps = ten'",
        error="--gin_param 'run.steps = ten': Failed to parse token 'ten'; expected int, such as "
        "2700",
    ),
    Case(
        "a class without its module",
        _QUICKSTART + "'step.optimizer = @Adafactor'",
        error="--gin_param 'step.optimizer = @Adafactor': step.optimizer: @Adafactor names no "
        "module. Did you mean @lingvo_gshard.training.step.adafactor.Adafactor?",
    ),
    Case(
        "a router without its module",
        _QUICKSTART + "'task.decoder.moe.router = @Top2Router'",
        error="--gin_param 'task.decoder.moe.router = @Top2Router': task.decoder.moe.router: "
        "@Top2Router names no module. Did you mean "
        "@lingvo_gshard.layers.moe.routers.top2.Top2Router?",
    ),
    Case(
        "a class in a module that does not define it",
        _QUICKSTART + "'step.optimizer = @lingvo_gshard.Muon'",
        error="--gin_param 'step.optimizer = @lingvo_gshard.Muon': step.optimizer: "
        "@lingvo_gshard.Muon does not exist. Did you mean "
        "@lingvo_gshard.wings.optimizers.muon.Muon?",
    ),
    Case(
        "a last name of a path with a wrong value",
        _QUICKSTART + "'clip_norm = -1.0'",
        error="--gin_param 'clip_norm = -1.0': step.clip_norm is -1.0; expected a number of 0 or "
        "more",
    ),
    Case(
        "a path as a flag, with a wrong value",
        _TRAIN + "--input.batch_rows=0",
        error="--gin_param 'input.batch_rows = 0': input.batch_rows is 0; expected a whole number "
        "of 1 or more",
    ),
    Case(
        "a path as a flag with a space, and a text without quotes",
        _TRAIN + "--run.steps many",
        error="--gin_param \"run.steps = 'many'\": run.steps: expected int, such as 2700; got the "
        "string 'many'",
    ),
    Case(
        "a path as a flag that is not there",
        _TRAIN + "--step.optimizer.learning_rate=1e-3",
        error="--gin_param 'step.optimizer.learning_rate = 1e-3': unknown name "
        "'step.optimizer.learning_rate'. Did you mean one of step.local_updates.learning_rate, "
        "step.schedule.learning_rate?",
    ),
    Case(
        "the size of a batch, as others call it",
        _TRAIN + "--batch_size=8",
        error="Unknown command line flag 'batch_size'. Did you mean '--input.batch_rows'?",
    ),
    Case(
        "a learning rate as a flag",
        _TRAIN + "--learning_rate=1e-3",
        error="Unknown command line flag 'learning_rate'. Did you mean one of "
        "--step.local_updates.learning_rate, --step.schedule.learning_rate?",
    ),
    Case(
        "a number of layers as a flag",
        _TRAIN + "--num_layers=3",
        error="Unknown command line flag 'num_layers'. Did you mean one of "
        "--task.decoder.num_layers, --task.encoder.num_layers?",
    ),
    Case(
        "hyperparameters as flags",
        _TRAIN + "--input.batch_rows=8 --step.precision=bfloat16 --params=input.batch_rows",
        prints=("input.batch_rows = 8",),
    ),
    Case(
        "a language that the corpus does not have",
        _TRAIN + "--input.languages='(\"jp\",)'",
        error="input.languages: the corpus has no 'jp'. Valid: af, ar, ..., zh_Hans, zh_Hant.",
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
        prints=("# Largest global norm", "step.clip_norm = 1.0"),
    ),
    Case(
        "an experiment whose module has a syntax error",
        "gshard-train --experiment=mine.small --logdir=run",
        given=(write("mine.py", "import os\ndef f(:\n"),),
        error="the module mine cannot be imported: .../mine.py:2: SyntaxError: invalid syntax",
    ),
    Case(
        "an experiment whose module needs a missing package",
        "gshard-train --experiment=mine.small --logdir=run",
        given=(write("mine.py", "import os\nimport not_here\n"),),
        error="the module mine cannot be imported: .../mine.py:2: ModuleNotFoundError: "
        "No module named 'not_here'",
    ),
    Case(
        "an experiment whose module fails",
        "gshard-train --experiment=mine.small --logdir=run",
        given=(write("mine.py", 'import json\njson.loads("x")\n'),),
        error="the module mine cannot be imported: .../mine.py:2: JSONDecodeError: "
        "Expecting value: line 1 column 1 (char 0)",
    ),
    Case(
        "an experiment whose module ends the program",
        "gshard-train --experiment=mine.small --logdir=run",
        given=(write("mine.py", "import sys\nsys.exit(3)\n"),),
        error="the module mine cannot be imported: .../mine.py:2: it ends the "
        "program (exit code 3)",
    ),
    Case(
        "a class whose module has a syntax error",
        _QUICKSTART + "'step.optimizer = @mine.Optimizer'",
        given=(write("mine.py", "import os\ndef f(:\n"),),
        error="...step.optimizer: the module mine cannot be imported: .../mine.py:2: "
        "SyntaxError: invalid syntax",
    ),
    Case(
        "steps that are no number",
        "gshard-train --experiment=test.tiny --logdir=run --steps=ten",
        error="--steps=ten: expected a whole number, such as 100",
    ),
    Case(
        "a seed that is no number",
        "gshard-train --experiment=test.tiny --logdir=run --seed=abc",
        error="--seed=abc: expected a whole number, such as 100",
    ),
    Case(
        "a seed that is a text",
        "gshard-train --experiment=test.tiny --logdir=run --gin_param='step.seed = \"x\"'",
        error="--gin_param 'step.seed = \"x\"': step.seed: expected int, such as 1; got the "
        "string 'x'",
    ),
    Case(
        "a negative seed",
        "gshard-train --experiment=test.tiny --logdir=run --seed=-1",
        error="step.seed is -1; expected a whole number of 0 or more",
    ),
    Case(
        "a seed of 67 bits",
        "gshard-train --experiment=test.tiny --logdir=run --seed=99999999999999999999",
        error="step.seed is 99999999999999999999; expected a whole number of 0 or more that "
        "fits into 32 bits",
    ),
    Case(
        "no rows in a batch",
        _QUICKSTART + "'input.batch_rows = 0'",
        error="--gin_param 'input.batch_rows = 0': input.batch_rows is 0; expected a whole number "
        "of 1 or more",
    ),
    Case(
        "rows of no source tokens",
        _QUICKSTART + "'input.source_length = 0'",
        error="--gin_param 'input.source_length = 0': input.source_length is 0; expected a whole "
        "number of 1 or more",
    ),
    Case(
        "rows of a negative number of target tokens",
        _QUICKSTART + "'input.target_length = -1'",
        error="--gin_param 'input.target_length = -1': input.target_length is -1; expected a whole "
        "number of 2 or more",
    ),
    Case(
        "rows of no tokens",
        "gshard-train --experiment=language_model.quickstart --logdir=run "
        "--gin_param='input.length = 0'",
        error="--gin_param 'input.length = 0': input.length is 0; expected a whole number of 2 or "
        "more",
    ),
)
