"""Verifies an experiment: its training step partitioned, compared with the same step whole."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.data.batching import synthetic
from lingvo_gshard.data.input import Batch
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.verification import shrinking
from lingvo_gshard.runtime.verification.causes import find_first
from lingvo_gshard.runtime.verification.comparison import (
    Difference,
    compare,
    compare_digests,
    compare_update,
)
from lingvo_gshard.runtime.verification.report import Compared, Finding, Verification
from lingvo_gshard.runtime.verification.steps import ObservedStep, run_step
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training import experiments
from lingvo_gshard.training.trainer import Trainer

# Gradients are compared relative to their own scale, but at least this share of the largest one's.
_LEAST_SHARE = 1e-3
# Scale of the noise that is added to weights that are initially constant.
_NOISE = 0.05

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class VerifyOptions:
    """How an experiment is verified.

    Attributes:
      mesh: axes and sizes, such as "data=4,model=2". None takes the experiment's mesh.
      strategy: name or table of a strategy. None takes the experiment's, or "expert".
      device_order: "contiguous" or "topology".
      partitioner: "gspmd" or "shardy".
      tolerance: the largest relative difference that counts as equal.
      seed: seed of weights, batch and random numbers.
      shrink: whether to make sizes smaller.
      dropout: whether dropout stays on.
      max_devices: the largest number of devices; a larger mesh is made smaller.
    """

    mesh: str | None = None
    strategy: str | None = None
    device_order: str = "contiguous"
    partitioner: str = "gspmd"
    tolerance: float = 1e-9
    seed: int = 1
    shrink: bool = True
    dropout: bool = True
    max_devices: int = 16


def verify_experiment(
    experiment: Params, options: VerifyOptions, say: Say = lambda text: None
) -> Verification:
    """Compares an experiment's training step over a mesh with the same step on one device.

    Args:
      experiment: Params of the experiment.
      options: how to verify it.
      say: called with each stage.

    Raises:
      ValueError: there is no mesh, or a hyperparameter or name is wrong.
    """
    started = time.monotonic()
    mesh = experiments.requested_mesh(experiment, options.mesh, options.device_order)
    if mesh is None:
        raise ValueError("--mesh is missing, such as --mesh=data=4,model=2")
    asked = experiments.requested_partitioning(experiment, mesh, options.strategy)
    say("Building the model")
    small = shrinking.shrink(experiment, asked, options)
    partitioning = dataclasses.replace(asked, mesh=small.mesh)
    case = _Case(small.params, partitioning, options)
    partitioned, whole = case.run(say)
    compared = list(_compare(partitioned, whole, case))
    first = find_first(compared, partitioned, case.trainer, partitioning.mesh)
    if first is not None and options.dropout and shrinking.has_dropout(small.params):
        first = _without_dropout(first, small.params, partitioning, options, say)
    return Verification(
        subject=experiment.name,
        mesh=str(partitioning.mesh),
        strategy=partitioning.strategy.to_text(),
        notes=small.notes,
        tolerance=options.tolerance,
        compared=tuple(compared),
        first=first,
        seconds=time.monotonic() - started,
    )


class _Case:
    """A trainer with a state and a batch, to be run partitioned and whole."""

    def __init__(self, params: Params, partitioning: Partitioning, options: VerifyOptions):
        params = params.copy()
        params.trainer.seed = options.seed
        self.trainer: Trainer = experiments.make_trainer(params)
        experiments.check_overrides(partitioning, self.trainer)
        self.partitioning, self.options = partitioning, options
        self.batch = _batch(params, self.trainer)
        self.state = _state(self.trainer, options.seed)

    def run(self, say: Say) -> tuple[ObservedStep, ObservedStep]:
        """Returns the partitioned step and the whole one."""
        mesh = self.partitioning.mesh
        devices = devices_for(mesh.size)
        say(f"Compiling and running the step over {mesh.size} devices")
        made_of = self.state, self.batch, self.options.partitioner
        partitioned = run_step(self.trainer, self.partitioning, devices, *made_of)
        say("Compiling and running the step on one device")
        one = Mesh(tuple((name, 1) for name in mesh.names))
        alone = dataclasses.replace(self.partitioning, mesh=one)
        gradients = [np.asarray(value) for _, value in partitioned.gradients.values()]
        whole = run_step(self.trainer, alone, devices[:1], *made_of, gradients)
        return partitioned, whole


def _batch(params: Params, trainer: Trainer) -> Batch:
    """Returns a synthetic batch; the first one of the input if the task cannot describe its ids."""
    specs, id_ranges = experiments.batch_specs(params), trainer.task.id_ranges()
    try:
        batch = {
            name: synthetic.make_array(name, s.shape, s.dtype.as_numpy_dtype, id_ranges.get(name))
            for name, s in specs.items()
        }
    except ValueError:
        return experiments.first_batch(params.input.instantiate(), trainer.p.seed)
    for name, array in batch.items():
        if name.endswith("segments"):
            # Rows end at different positions, so that devices have different numbers of tokens.
            rows, length = array.shape
            end = length - np.arange(rows) * (length // 2) // rows
            array[np.arange(length) >= end[:, None]] = 0
    return batch


def _state(trainer: Trainer, seed: int) -> NestedMap:
    """Returns a state in the middle of the training, NumPy arrays.

    Weights that are initially constant get noise, since a weight of zeros hides what is wrong
    before it.
    """
    state = trainer.init_state().transform(lambda x: np.array(x))
    state.step = np.array(max(trainer.p.steps // 2, 1), np.int32)
    rng = np.random.default_rng(seed)
    specs = trainer.theta_specs.flatten()

    def with_noise(weight: np.ndarray) -> np.ndarray:
        if weight.size == 0 or np.ptp(weight.astype(np.float32)):
            return weight
        return (weight + _NOISE * rng.normal(size=weight.shape)).astype(weight.dtype)

    pairs = zip(specs, state.theta.flatten(), strict=True)
    state.theta = state.theta.pack(w if s.update_rule else with_noise(w) for s, w in pairs)
    state.update(
        trainer.initial_extras(state.theta.transform(tf.convert_to_tensor)).transform(
            lambda x: np.array(x)
        )
    )
    return state


def _compare(partitioned: ObservedStep, whole: ObservedStep, case: _Case) -> Iterator[Compared]:
    """Yields all tensors of a step compared, in the order in which it computes them."""
    mesh, tolerance = case.partitioning.mesh, case.options.tolerance

    def row(kind: str, name: str, difference: Difference) -> Compared:
        is_equal = difference.relative <= tolerance
        return Compared(kind, name, difference, is_equal)

    theirs = {observed.name: value for observed, value in whole.outputs}
    for (observed, value), is_digest in zip(
        partitioned.outputs, partitioned.is_digest, strict=True
    ):
        other: Any = theirs[observed.name]
        found = compare_digests(value, other) if is_digest else compare(value, other, mesh)
        yield row("output", observed.name, found)
    for name, value in partitioned.metrics.items():
        # These follow from the gradients, of which the whole optimizer gets the partitioned ones.
        if name not in ("gradient_norm", "learning_rate"):
            kind = "loss" if name == "loss" else "metric"
            numbers = np.array(value), np.array(whole.metrics[name])
            yield row(kind, name, compare(*numbers, mesh))
    largest = max(float(np.abs(value).max(initial=0)) for _, value in whole.gradients.values())
    for path, (_, value) in partitioned.gradients.items():
        other = whole.gradients[path][1]
        yield row("gradient", path, compare(value, other, mesh, _LEAST_SHARE * largest))
    before = dict(zip(partitioned.state, case.state.flatten(), strict=True))
    for path, value in partitioned.state.items():
        if path.startswith(("theta.", "moments.")):
            found = compare_update(value, whole.state[path], before[path], mesh)
            yield row("new weight", path, found)


def _without_dropout(
    first: Finding, params: Params, partitioning: Partitioning, options: VerifyOptions, say: Say
) -> Finding:
    """Returns a finding that says whether the difference disappears without dropout."""
    say("They differ. Trying without dropout")
    case = _Case(shrinking.without_dropout(params)[0], partitioning, options)
    rows = _compare(*case.run(say), case)
    if all(each.is_equal for each in rows):
        return first.caused_by_dropout()
    return first
