"""Measures the speed of training steps relative to matrix products on the same device."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable

import numpy as np
from absl import flags

from lingvo_gshard.core import (
    NestedMap,
    Params,
    Progress,
    TokenShape,
    UserError,
    explained,
    known_sizes,
    layer_method,
    registry,
)
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.layers import FeedForward, MixtureOfExperts, Sequential, TransformerStack
from lingvo_gshard.runtime import SingleDeviceRuntime
from lingvo_gshard.tasks import BatchSpecs, Task
from lingvo_gshard.tools.benchmarks import common
from lingvo_gshard.tools.benchmarks.timing import in_turns, seconds_of
from lingvo_gshard.tools.console import output, transient_stages
from lingvo_gshard.tools.flags.definitions import Flags, integer, maker, string
from lingvo_gshard.tools.profile_reports.profile_report import print_result
from lingvo_gshard.training import Trainer, experiments, make_trainer
from lingvo_gshard.wings.facts.step import step_flops
from lingvo_gshard.wings.profiling.files import ProfileFiles
from lingvo_gshard.wings.profiling.observer import ProfiledStep, tracer_of, write_profile
from lingvo_gshard.wings.profiling.timeline import StepRange
from lingvo_gshard.wings.profiling.trace import Recorder
from lingvo_gshard.wings.services.runtime import DeviceRuntime
from lingvo_gshard.wings.verification import synthetic

Batch = dict[str, np.ndarray]


# The flags of an encoder alone.
STACK_FLAGS: Flags = dict(
    model_dim=integer("Model dimension of the encoder alone.", 512, 1),
    hidden_dim=integer(
        "Hidden dimension of the encoder's feed-forward layers and experts.", 2048, 1
    ),
    num_experts=integer("Number of experts of the encoder's mixtures of experts.", 8, 1),
    num_heads=integer("Attention heads of each layer of the encoder.", 8, 1),
    num_layers=integer("Number of layers of the encoder; every other one has experts.", 2, 1),
    rematerialize=string("Rematerialization policy of the encoder (docs/training.md).", "none"),
    tokens=integer("Tokens of the encoder's batch.", 4096, 1),
    row_length=integer("Tokens of a row of the encoder's batch.", 256, 1),
)
define_flags = maker(
    experiment=common.EXPERIMENT,
    json=output.json_flag(),
    repeats=common.REPEATS,
    gemm_size=common.gemm_size(),
    profile="Directory for a profile of each model.",
    **STACK_FLAGS,
)


def run(values: flags.FlagValues, console: output.Console) -> int:
    """Measures, prints the table, writes the rows, and returns the exit code."""
    experiment = registry.get(values.experiment)
    shape = whole_rows(values)
    cases = experiment_cases(experiment)
    cases += stack_cases(stack_params(values), experiment.step, *shape)
    profile = None
    if values.profile:
        with explained(f"--profile={values.profile} cannot be written", OSError):
            pathlib.Path(values.profile).mkdir(parents=True, exist_ok=True)
        profile = functools.partial(profile_case, directory=values.profile, console=console)
    with transient_stages(console, "starting") as progress:
        rows = measure(cases, values.repeats, values.gemm_size, progress, profile)
    headings = ("GFLOP", "seconds", "GFLOP/s", "product", "ratio", "compile")
    cells = [
        (
            row.name,
            f"{row.flops / 1e9:,.1f}",
            f"{row.seconds:.4f}",
            f"{row.flops / row.seconds / 1e9:,.1f}",
            f"{row.gemm_rate / 1e9:,.1f}",
            f"{row.ratio:.1%}",
            f"{row.compile_seconds:.1f}",
        )
        for row in rows
    ]
    caption = "ratio: to the rate of a matrix product"
    console.print_rows(("training step",), headings, cells, caption)
    return common.write(values, rows)


def whole_rows(values: flags.FlagValues) -> tuple[int, int]:
    """Returns rows and row length of a batch of --tokens; UserError if they do not divide."""
    if values.tokens % values.row_length:
        raise UserError(
            f"--tokens={values.tokens} is not a multiple of --row_length={values.row_length}"
        )
    return values.tokens // values.row_length, values.row_length


def stack_params(values: flags.FlagValues) -> Params:
    """Returns the Params of the encoder alone; dropout is the paper's (arXiv 2006.16668)."""
    stack = TransformerStack.params().set(
        num_layers=values.num_layers,
        execution=Sequential.params().set(rematerialize=values.rematerialize),
        model_dim=values.model_dim,
        num_heads=values.num_heads,
        hidden_dim=values.hidden_dim,
        input_dropout_rate=0.1,
        residual_dropout_rate=0.1,
        attention_dropout_rate=0.1,
    )
    stack.moe.num_experts = values.num_experts
    return stack


@dataclasses.dataclass(frozen=True)
class StepCase:
    """A training step to measure with a synthetic batch, and its useful operations."""

    name: str
    trainer: Trainer
    batch: Batch
    flops: int


@dataclasses.dataclass
class StepTiming:
    """A measured step.

    Attributes:
      flops: useful floating-point operations of a step.
      seconds: best time of a step.
      gemm_rate: rate of the reference product, in FLOP/s.
      ratio: flops / seconds / gemm_rate.
      compile_seconds: time of the first step.
    """

    name: str
    flops: int
    seconds: float
    gemm_rate: float
    ratio: float
    compile_seconds: float


class StackTask(Task):
    """Trains an encoder alone to map random vectors to random vectors."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("stack", TransformerStack.params(), "Params of the encoder.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        self.create_child("stack", self.p.stack)

    @layer_method
    def loss(self, theta: NestedMap, batch: Batch) -> tuple[tf.Tensor, NestedMap]:
        """Returns the mean squared error and no metrics."""
        y_BLM = self.stack.fprop(theta.stack, batch["x"], batch["segments"])
        return tf.reduce_mean(tf.square(y_BLM - batch["target"])), NestedMap()

    def token_shape(self, batch: BatchSpecs) -> TokenShape:
        """Returns the rows and positions of the random vectors."""
        rows, length = known_sizes(batch["segments"].shape)
        return TokenShape(rows, length)


def experiment_cases(experiment: Params) -> list[StepCase]:
    """Returns the steps of an experiment, and of the same model with dense layers.

    Batches have the experiment's shapes and are full of synthetic sentences, so no data is read.
    """
    specs = experiments.batch_specs(experiment)
    task = experiments.with_configured_vocabularies(experiment)
    cases = []
    for name, params in _with_and_without_experts(experiment.name, task):
        trainer = make_trainer(experiment, params)
        batch = synthetic.make_batch(specs, trainer.task.id_ranges())
        cases.append(StepCase(name, trainer, batch, step_flops(trainer.task, specs)))
    return cases


def stack_cases(stack: Params, trainer: Params, rows: int, length: int) -> list[StepCase]:
    """Returns the steps of an encoder alone, and of the same encoder with dense layers."""
    cases = []
    for name, params in _with_and_without_experts("layers", stack):
        task = StackTask.params().set(stack=params).instantiate()
        vectors = tf.TensorSpec((rows, length, params.model_dim))
        segments = tf.TensorSpec((rows, length), tf.int32)
        specs = {"x": vectors, "target": vectors, "segments": segments}
        batch = synthetic.make_batch(specs, task.id_ranges())
        cases.append(StepCase(name, trainer.instantiate(task), batch, step_flops(task, specs)))
    return cases


def measure(
    cases: list[StepCase],
    repeats: int,
    gemm_size: int,
    progress: Progress,
    profile: Callable[[StepCase, SingleDeviceRuntime], None] | None = None,
) -> list[StepTiming]:
    """Measures each case: the best of `repeats` steps, alternating with matrix products.

    Each step is followed by matrix products with the same number of operations in total, so that
    both take about as long. On a shared machine, the best of many short products would be faster
    than any period as long as a step. At the end, `profile` is called with each case and its
    runtime.
    """
    rows, runtimes, clocks = [], [], []
    for case in cases:
        product, operations = products(gemm_size, case.flops)
        progress.begin(f"compiling {case.name}")
        runtime = SingleDeviceRuntime(case.trainer)
        runtime.init_state()
        rows.append((case, operations, step_seconds(runtime, case.batch)))
        runtimes.append(runtime)
        clocks.append(functools.partial(step_seconds, runtime, case.batch))
        clocks.append(functools.partial(seconds_of, product))
    best = in_turns(clocks, repeats, progress).min(1).tolist()
    if profile is not None:
        for case, runtime in zip(cases, runtimes, strict=True):
            progress.begin(f"profiling {case.name}")
            profile(case, runtime)
    return [
        StepTiming(
            case.name,
            case.flops,
            seconds,
            operations / product,
            case.flops / seconds / (operations / product),
            compile_seconds,
        )
        for (case, operations, compile_seconds), seconds, product in zip(
            rows, best[::2], best[1::2], strict=True
        )
    ]


def _with_and_without_experts(name: str, params: Params) -> list[tuple[str, Params]]:
    """Returns the model, and the model with dense layers of the same FLOPs as its mixtures."""
    dense = params.copy()
    stacks = [node for _, node in dense.nodes() if node.cls is TransformerStack and node.moe_every]
    stacks = [stack for stack in stacks if stack.moe.cls is MixtureOfExperts]
    for stack in stacks:
        experts = stack.moe.router.cls.experts_per_token(stack.moe.router)
        hidden_dim = round(experts * (stack.moe.hidden_dim or stack.hidden_dim))
        activation = stack.moe.experts.activation
        stack.moe = FeedForward.params()
        stack.moe.set(hidden_dim=hidden_dim, activation=activation, use_bias=False)
    as_it_is = [(f"{name}, experts", params)] if stacks else []
    return [*as_it_is, (f"{name}, dense", dense)]


def products(size: int, flops: int) -> tuple[Callable[[], None], int]:
    """Returns a function of compiled products with about `flops` operations, and their number."""
    x = tf.random.stateless_normal((size, size), (1, 2))
    product = tf.function(lambda x: tf.matmul(x, x), jit_compile=True)
    count = max(1, round(flops / (2 * size**3)))

    def run() -> None:
        for _ in range(count):
            product(x)[0, 0].numpy()

    product(x)
    return run, count * 2 * size**3


def step_seconds(runtime: DeviceRuntime, batch: Batch) -> float:
    """Runs a step to its end and returns its seconds."""
    return seconds_of(lambda: runtime.train_step(batch).read())


_STEPS = StepRange(1, 3)


def profile_case(
    case: StepCase, runtime: SingleDeviceRuntime, directory: str, console: output.Console
) -> None:
    """Profiles some steps of a model into a folder of the directory, and prints the profile."""
    recorder = Recorder(tracer_of(runtime))
    for step in range(_STEPS.first, _STEPS.last + 1):
        recorder.begin(step)
        recorder.start_step()
        runtime.train_step(case.batch).read()
    trace = recorder.end()
    name = re.sub(r"[^\w.]+", "_", case.name)
    files = ProfileFiles(pathlib.Path(directory) / name, _STEPS)
    step = ProfiledStep(case.name, case.trainer, runtime, None)
    print_result(write_profile(step, recorder, trace, case.batch, files), console)
