"""What each way to train a larger model costs in memory and in time: a step with one at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.stacks.repeat import Repeat
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tools.benchmarks import step
from lingvo_gshard.training.optim.adafactor import Adafactor
from lingvo_gshard.training.optim.adam import Adam
from lingvo_gshard.training.optim.lion import Lion
from lingvo_gshard.training.optim.momentum import Momentum

# Sets a choice in an experiment's Params.
Choice = Callable[[Params], None]

AS_IT_IS = "layers one by one"


@dataclasses.dataclass
class Row:
    """A step with one choice.

    state_bytes: of weights, moments and whatever else is kept between steps; temporary_bytes: of
    what else a step holds at most. ratio: of the medians' time to that of layers one by one.
    """

    name: str
    state_bytes: int
    temporary_bytes: int
    seconds: float
    ratio: float
    compile_seconds: float


def choices() -> dict[str, Choice]:
    """Returns what is measured: name -> what sets it."""
    return {
        AS_IT_IS: lambda p: None,
        "a loop": _loops("none"),
        "a loop, rematerialize products": _loops("products"),
        "a loop, rematerialize products_but_hidden": _loops("products_but_hidden"),
        "a loop, rematerialize full": _loops("full"),
        "2 micro-batches": _in_trainer(micro_batches=2),
        "4 micro-batches": _in_trainer(micro_batches=4),
        "bfloat16": _in_trainer(precision="bfloat16"),
        "bfloat16_weights": _in_trainer(precision="bfloat16_weights"),
        "averaged weights": _in_trainer(average_decay=0.999),
        "Adam, moments in bfloat16": _in_trainer(
            optimizer=Adam.params().set(moment_dtype="bfloat16")
        ),
        "Adam, moments in int8": _in_trainer(optimizer=Adam.params().set(moment_dtype="int8")),
        "Adafactor": _in_trainer(optimizer=Adafactor.params()),
        "Lion": _in_trainer(optimizer=Lion.params()),
        "SGD with momentum": _in_trainer(optimizer=Momentum.params()),
    }


def measure(
    experiment: Params, layers: int, repeats: int, report: Callable[[str], None]
) -> Iterator[Row]:
    """Yields a row for each choice: medians of steps taken in turns with those as it is.

    experiment: its encoder and its decoder get `layers` layers each. report: told in words what is
    under way. Raises ValueError if it is neither a translation nor a language model.
    """
    plain = None
    for name, choose in choices().items():
        report(f"compiling {name}")
        runtime, batch, compile_seconds = _compiled(experiment, layers, choose)
        plain = plain or runtime
        report(f"measuring {name}")
        turns = [
            [step.step_seconds(each, batch) for each in (runtime, plain)] for _ in range(repeats)
        ]
        mine, base = np.array(turns).T
        memory = runtime.executable().memory()
        ratio = float(np.median(mine / base)) if runtime is not plain else 1.0
        yield Row(
            name,
            memory["arguments"],
            memory["temporaries"],
            float(np.median(mine)),
            ratio,
            compile_seconds,
        )


def _compiled(
    experiment: Params, layers: int, choose: Choice
) -> tuple[SpmdRuntime, step.Batch, float]:
    """The runtime after its first step, its batch, and the seconds that this step took."""
    params = experiment.copy()
    for stack in _stacks(params):
        stack.num_layers = layers
    choose(params)
    case = step.experiment_cases(params)[0]
    partitioning = Partitioning.make("data=1", "replicated")
    runtime = SpmdRuntime(case.trainer, partitioning, devices_for(1))
    runtime.init_state()
    return runtime, case.batch, step.step_seconds(runtime, case.batch)


def _loops(policy: str) -> Choice:
    """Runs all stacks as loops with a rematerialization policy."""

    def choose(params: Params) -> None:
        for stack in _stacks(params):
            stack.execution = Repeat.params().set(rematerialize=policy)

    return choose


def _stacks(params: Params) -> list[Params]:
    """Those of an experiment's layers: a language model has a decoder alone."""
    return [params.task.get(name) for name in ("encoder", "decoder") if name in params.task]


def _in_trainer(**values: object) -> Choice:
    return lambda params: params.trainer.set(**values)
