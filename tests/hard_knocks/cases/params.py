"""Experiments, gin files and hyperparameters with wrong names, types and values."""

from tests.hard_knocks.case import Case
from tests.hard_knocks.prepare import folder, link, write

_TRAIN = "gshard-train --logdir=run --experiment="
_TINY = _TRAIN + "test.tiny "
_QUICK = _TRAIN + "translation.quickstart "
_MODEL = "gshard-inspect --experiment=translation.quickstart --mesh=data=1 "

CASES = (
    Case(
        "no experiment",
        "gshard-train --logdir=run",
        error="--experiment is missing; gshard-train --list shows the experiments",
    ),
    Case(
        "no logdir",
        "gshard-train --experiment=test.tiny",
        error="--logdir is missing: the directory for checkpoints and metrics",
    ),
    Case(
        "an empty logdir",
        "gshard-train --experiment=test.tiny --logdir=",
        error="--logdir is missing: the directory for checkpoints and metrics",
    ),
    Case(
        "an empty experiment",
        _TRAIN,
        error="--experiment is missing; gshard-train --list shows the experiments",
    ),
    Case(
        "a misspelled experiment",
        _TRAIN + "translation.quikstart",
        error="Unknown experiment 'translation.quikstart'. Did you mean 'translation.quickstart'?",
    ),
    Case(
        "an experiment without a room",
        _TRAIN + "quickstart",
        error="Unknown experiment 'quickstart'. Did you mean 'translation.quickstart'?",
    ),
    Case(
        "an experiment in a module that is not there",
        _TRAIN + "no.such.thing",
        error="Unknown experiment 'no.such.thing'. The module no is neither installed "
        "nor in the current directory nor on PYTHONPATH. Valid: "
        "gshard_paper.bilingual, ...",
    ),
    Case(
        "a module of one's own that lacks it",
        _TRAIN + "mine.tiny",
        given=(write("mine.py", ""),),
        error="Unknown experiment 'mine.tiny'. Did you mean 'test.tiny'?",
    ),
    Case(
        "an unknown Params path",
        _TINY + "--gin_param='run.stepz = 5'",
        error="--gin_param 'run.stepz = 5': unknown name 'run.stepz'. Did you mean 'run.steps'?",
    ),
    Case(
        "an unknown last part",
        _QUICK + "--gin_param='task.encoder.dropout_rate = 0.1'",
        error="--gin_param 'task.encoder.dropout_rate = 0.1': unknown name "
        "'task.encoder.dropout_rate'. Did you mean one of "
        "task.encoder.layer.cross_attention.dropout_rate, "
        "task.encoder.layer.self_attention.dropout_rate, "
        "task.encoder.moe.experts.dropout_rate?",
    ),
    Case(
        "a name without its path",
        _QUICK + "--gin_param='learning_rate = 0.1'",
        error="--gin_param 'learning_rate = 0.1': no value uses the macro 'learning_rate', "
        "and it is not the last name of one hyperparameter alone. Did you mean one of ...",
    ),
    Case(
        "a gin parameter without a value",
        _TINY + "--gin_param='run.steps ='",
        error="--gin_param 'run.steps =': Unable to parse value. Write NAME = VALUE, such as "
        "run.steps = 12",
    ),
    Case(
        "a gin parameter without an equals sign",
        _TINY + "--gin_param='run.steps 5'",
        error="--gin_param 'run.steps 5': Couldn't parse statement, expected ':' or '='. Write "
        "NAME = VALUE, such as run.steps = 100",
    ),
    Case(
        "a text for a number",
        _TINY + "--gin_param='run.steps = \"many\"'",
        error="--gin_param 'run.steps = \"many\"': run.steps: expected int, such as "
        "12; got the string 'many'",
    ),
    Case(
        "a bare word for a text",
        _TINY + "--gin_param='run.steps = many'",
        error="--gin_param 'run.steps = many': Failed to parse token 'many'; "
        "expected int, such as 12",
    ),
    Case(
        "a bare word for a text that stands for a strategy",
        _TINY + "--gin_param='sharding.strategy = tensor'",
        error="--gin_param 'sharding.strategy = tensor': Failed to parse token 'tensor'. Write "
        'strings in quotes: "tensor"',
    ),
    Case(
        "a fraction for a whole number",
        _TINY + "--gin_param='run.steps = 2.5'",
        error="--gin_param 'run.steps = 2.5': run.steps: expected int, such as 12; "
        "got the float 2.5",
    ),
    Case(
        "a list for a number",
        _TINY + "--gin_param='run.steps = [1, 2]'",
        error="--gin_param 'run.steps = [1, 2]': run.steps: expected int, such as "
        "12; got the list [1, 2]",
    ),
    Case(
        "a value for a node",
        _QUICK + "--gin_param='task.encoder = 5'",
        error="--gin_param 'task.encoder = 5': task.encoder: this is a group of "
        "hyperparameters, which no int can replace",
    ),
    Case(
        "a class that is not there",
        _TINY + "--gin_param='step.optimizer = @no.such.Optimizer'",
        error="--gin_param 'step.optimizer = @no.such.Optimizer': step.optimizer: "
        "@no.such.Optimizer cannot be imported (No module named 'no'); expected "
        "@package.module.Class, ...",
    ),
    Case(
        "a class without a module",
        _TINY + "--gin_param='step.optimizer = @Adamm'",
        error="--gin_param 'step.optimizer = @Adamm': step.optimizer: @Adamm names no "
        "module. Did you mean @lingvo_gshard.training.step.adam.Adam?",
    ),
    Case(
        "a class of another kind",
        _TINY + "--gin_param='step.optimizer = @lingvo_gshard.layers.norm.LayerNorm'",
        error="--gin_param 'step.optimizer = @lingvo_gshard.layers.norm.LayerNorm': "
        "step.optimizer: LayerNorm cannot replace Adam",
    ),
    Case(
        "a function for a class",
        _TINY + "--gin_param='step.optimizer = @os.path.join'",
        error="--gin_param 'step.optimizer = @os.path.join': step.optimizer: "
        "expected a configurable class, such as "
        "@lingvo_gshard.training.step.adam.Adam; got join, which has no Params",
    ),
    Case(
        "a macro that is not there",
        _TINY + "--gin_param='run.steps = %STEPS'",
        error="--gin_param 'run.steps = %STEPS': the macro %STEPS is not defined",
    ),
    Case(
        "a gin file that is not there",
        _TINY + "--gin_file=no.gin",
        error="--gin_file: there is no file 'no.gin'",
    ),
    Case(
        "a gin file that is a directory",
        _TINY + "--gin_file=dir",
        given=(folder("dir"),),
        error="--gin_file: there is no file 'dir'",
    ),
    Case("an empty gin file name", _TINY + "--gin_file=", error="--gin_file: there is no file ''"),
    Case(
        "a gin file with a syntax error",
        _TINY + "--gin_file=a.gin",
        given=(write("a.gin", "run.steps = 5\nstep.seed = (\n"),),
        error='a.gin:3: EOF in multi-line statement. Close each bracket and each """',
    ),
    Case(
        "a gin file with an unknown name",
        _TINY + "--gin_file=a.gin",
        given=(write("a.gin", "run.steps = 5\n\nstep.sed = 5\n"),),
        error="a.gin:3: unknown name 'step.sed'. Did you mean 'step.seed'?",
    ),
    Case(
        "a gin file that is not text",
        _TINY + "--gin_file=a.gin",
        given=(write("a.gin", b"\xff\xfe\x00"),),
        error="a.gin: not UTF-8: 'utf-8' codec can't decode byte 0xff in position 0: "
        "invalid start byte",
    ),
    Case(
        "a gin file with NUL characters",
        _TINY + "--gin_file=a.gin",
        given=(write("a.gin", b"run.steps = 5\x00\n"),),
        error="a.gin:1: text follows the value. Write NAME = VALUE, such as run.steps = 12",
    ),
    Case(
        "a gin file that includes what is not there",
        _TINY + "--gin_file=a.gin",
        given=(write("a.gin", "include 'b.gin'\n"),),
        error="a.gin:1: there is no file 'b.gin'",
    ),
    Case(
        "a gin file that includes itself",
        _TINY + "--gin_file=a.gin",
        given=(write("a.gin", "include 'a.gin'\n"),),
        error="a.gin:1: 'a.gin' includes itself",
    ),
    Case(
        "a gin file that imports what is not there",
        _TINY + "--gin_file=a.gin",
        given=(write("a.gin", "import no_such_module\n"),),
        error="a.gin:1: 'import no_such_module': imports are not supported. Write full "
        "class names, such as x = @package.module.Class",
    ),
    Case(
        "a link to nowhere as gin file",
        _TINY + "--gin_file=a.gin",
        given=(link("a.gin", "nowhere"),),
        error="--gin_file: there is no file 'a.gin'",
    ),
    Case(
        "heads that do not divide the width",
        _MODEL + "--gin_param='task.encoder.num_heads = 7'",
        error="task.encoder.layer.self_attention: "
        "encoder.layers[0].self_attention.num_heads: 7 heads do not divide model_dim "
        "128",
    ),
    Case(
        "norms at an unknown place",
        _MODEL + "--gin_param='task.encoder.layer.norm_position = \"after\"'",
        error="...norm_position is 'after'; expected 'before', 'both', 'output', 'sum' or 'shared'",
    ),
    Case(
        "a limit that the activation does not read",
        _MODEL + "--gin_param='task.encoder.layer.feed_forward.gate_limit = 2.0'",
        error="task.encoder.layer.feed_forward: encoder.layers[0].feed_forward.gate_limit: 2.0 "
        "with encoder.layers[0].feed_forward.activation='relu', which does not read it; leave 7.0 "
        "or choose 'clamped_swiglu'",
    ),
    Case(
        "negative layers",
        _MODEL + "--gin_param='task.encoder.num_layers = -1'",
        error="--gin_param 'task.encoder.num_layers = -1': task.encoder.num_layers is -1; "
        "expected a whole number from 1 to 10,000",
    ),
    Case(
        "no experts",
        _MODEL + "--gin_param='task.encoder.moe.num_experts = 0'",
        error="task.encoder.moe.num_experts is 0; expected a whole number of 1 or more",
    ),
    Case(
        "a negative hidden size",
        _MODEL + "--gin_param='task.encoder.hidden_dim = -8'",
        error="--gin_param 'task.encoder.hidden_dim = -8': task.encoder.hidden_dim is -8; "
        "expected a whole number of 1 or more",
    ),
    Case(
        "a negative capacity",
        _MODEL + "--gin_param='task.encoder.moe.router.capacity_factor = -1.0'",
        error="--gin_param 'task.encoder.moe.router.capacity_factor = -1.0': "
        "task.encoder.moe.router.capacity_factor is -1.0; expected a number of 0 or "
        "more",
    ),
    Case(
        "no capacity at all",
        _MODEL + "--gin_param='task.encoder.moe.router.minimum_capacity = 0'",
        error="--gin_param 'task.encoder.moe.router.minimum_capacity = 0': "
        "task.encoder.moe.router.minimum_capacity is 0; expected a whole number of 1 or more",
    ),
    Case(
        "a group of no tokens",
        _MODEL + "--gin_param='task.encoder.moe.group_size = 0'",
        error="--gin_param 'task.encoder.moe.group_size = 0': task.encoder.moe.group_size "
        "is 0; expected a whole number of 1 or more",
    ),
    Case(
        "a negative learning rate",
        _TINY + "--gin_param='step.schedule.learning_rate = -1.0'",
        error="--gin_param 'step.schedule.learning_rate = -1.0': "
        "step.schedule.learning_rate is -1.0; expected a number above 0",
        changes=("run", "run/*"),
    ),
    Case(
        "a learning rate that is NaN",
        _TINY + "--gin_param='step.schedule.learning_rate = \"nan\"'",
        error="--gin_param 'step.schedule.learning_rate = \"nan\"': "
        "step.schedule.learning_rate: expected float, such as 0.03; got the string"
        " 'nan'",
    ),
    Case(
        "a negative warmup",
        _TINY + "--gin_param='step.schedule.warmup_steps = -1'",
        error="--gin_param 'step.schedule.warmup_steps = -1': "
        "step.schedule.warmup_steps is -1; expected a whole number of 0 or more",
        changes=("run", "run/*"),
    ),
    Case(
        "a negative clip norm",
        _TINY + "--gin_param='step.clip_norm = -1.0'",
        error="--gin_param 'step.clip_norm = -1.0': step.clip_norm is -1.0; expected "
        "a number of 0 or more",
        changes=("run", "run/*"),
    ),
    Case(
        "a decay of averages above one",
        _TINY + "--gin_param='step.average_decay = 1.5'",
        error="--gin_param 'step.average_decay = 1.5': step.average_decay is 1.5; "
        "expected a number of 0 or more and below 1",
        changes=("run", "run/*"),
    ),
    Case(
        "a beta of Adam above one",
        _TINY + "--gin_param='step.optimizer.beta1 = 2.0'",
        error="--gin_param 'step.optimizer.beta1 = 2.0': step.optimizer.beta1 is "
        "2.0; expected a number of 0 or more and below 1",
        changes=("run", "run/*"),
    ),
    Case(
        "negative checkpoints to keep",
        _TINY + "--gin_param='run.keep_checkpoints = -1'",
        error="--gin_param 'run.keep_checkpoints = -1': run.keep_checkpoints is "
        "-1; expected a whole number of 1 or more",
        changes=("run", "run/*"),
    ),
    Case(
        "no checkpoints to keep",
        _TINY + "--gin_param='run.keep_checkpoints = 0'",
        error="--gin_param 'run.keep_checkpoints = 0': run.keep_checkpoints is 0; "
        "expected a whole number of 1 or more",
        changes=("run", "run/*"),
    ),
    Case(
        "negative steps between checkpoints",
        _TINY + "--gin_param='run.checkpoint_every_steps = -1'",
        error="--gin_param 'run.checkpoint_every_steps = -1': "
        "run.checkpoint_every_steps is -1; expected a whole number of 0 or more",
        changes=("run", "run/*"),
    ),
    Case(
        "negative steps between logs",
        _TINY + "--gin_param='run.log_every_steps = -1'",
        error="--gin_param 'run.log_every_steps = -1': run.log_every_steps is -1; "
        "expected a whole number of 1 or more",
        changes=("run", "run/*"),
    ),
    Case(
        "zero steps between logs",
        _TINY + "--gin_param='run.log_every_steps = 0'",
        error="--gin_param 'run.log_every_steps = 0': run.log_every_steps is 0; "
        "expected a whole number of 1 or more",
        changes=("run", "run/*"),
    ),
    Case(
        "micro-batches that do not divide",
        _TINY + "--gin_param='step.micro_batches = 7'",
        error="step.micro_batches=7 does not divide input.batch_rows, the 16 rows of x",
        changes=("run", "run/*"),
    ),
    Case(
        "no micro-batches",
        _TINY + "--gin_param='step.micro_batches = 0'",
        error="--gin_param 'step.micro_batches = 0': step.micro_batches is 0; "
        "expected a whole number of 1 or more",
        changes=("run", "run/*"),
    ),
    Case(
        "an unknown precision",
        _TINY + "--gin_param='step.precision = \"float8\"'",
        error="step: step.precision is 'float8'. Did you mean 'float32'?",
        changes=("run", "run/*"),
    ),
    Case(
        "an unknown split of the trainer",
        _QUICK + "--gin_param='sharding.strategy = \"exprt\"' --mesh=data=2",
        error="--strategy=exprt: unknown strategy 'exprt'. Did you mean 'expert'? Join "
        "several by '_', or write a table such as 'B,G->data; H->model'.",
    ),
    Case(
        "zero steps of the flag",
        _TINY + "--steps=0",
        error="--steps=0: 0 is not a positive integer",
    ),
    Case(
        "negative steps of the flag",
        _TINY + "--steps=-1",
        error="--steps=-1: -1 is not a positive integer",
    ),
    Case(
        "an unknown flag",
        _TINY + "--stepz=5",
        error="Unknown command line flag 'stepz'. Did you mean: steps ?",
    ),
    Case("a flag without a value", _TINY + "--steps", error="Missing value for flag --steps"),
    Case(
        "an argument that is no flag",
        _TINY + "now",
        error="'now' is not a flag; this command takes only flags, see --help",
    ),
    Case(
        "a value for a switch",
        _TINY + "--list=perhaps",
        error="--list=perhaps: expected true, false or no value",
    ),
    Case(
        "an unknown remat policy",
        _MODEL + "--gin_param='task.encoder.execution = @lingvo_gshard.wings.repeat.loop.Repeat' "
        "--gin_param='task.encoder.execution.rematerialize = \"al\"'",
        error="task.encoder: encoder.execution.rematerialize: unknown rematerialization "
        "policy 'al'. Valid: exchanges, exchanges_offloaded, full, full_offloaded, none, "
        "products, products_but_hidden, products_but_hidden_offloaded, products_offloaded.",
    ),
)
