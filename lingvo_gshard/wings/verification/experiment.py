"""Verifies an experiment: its training step partitioned, compared with the same step whole."""

from __future__ import annotations

import dataclasses
import time

import msgspec
import numpy as np

from lingvo_gshard.core import SILENT, NestedMap, Params, Progress, UserError, tf
from lingvo_gshard.data import Batch
from lingvo_gshard.runtime import Executable, Program, devices_for
from lingvo_gshard.sharding import Mesh, Partitioning, interpreted
from lingvo_gshard.training import Trainer, experiments, precision
from lingvo_gshard.wings.local_updates.runtime import outer_step_program
from lingvo_gshard.wings.local_updates.workers import Workers, check
from lingvo_gshard.wings.verification import findings, shrinking, steps, synthetic
from lingvo_gshard.wings.verification.causes import describe, find_first
from lingvo_gshard.wings.verification.rules import Evidence
from lingvo_gshard.wings.verification.shrinking import VerifyOptions

# Workers' weights and outer moments differ by noise of this scale.
_UPDATE_NOISE = 0.05


def _inputs(program: Program, trainer: Trainer, count: int, state: NestedMap) -> list[np.ndarray]:
    """Returns workers' weights that differ, the last outer weights, moments, stopped, the step."""
    rng = np.random.default_rng(trainer.p.seed)
    theta = [np.asarray(x, np.float64) for x in state.theta.flatten()]

    def noisy(shape: tuple[int, ...]) -> np.ndarray:
        return _UPDATE_NOISE * rng.normal(size=shape)

    values = [x + noisy((count, *x.shape)) for x in theta] + theta
    moments = program.inputs[len(values) : -2]
    values += [noisy(array.shape) for array in moments]
    values += [np.zeros(count, bool), np.asarray(state.step)]
    return [x.astype(a.dtype) for x, a in zip(values, program.inputs, strict=True)]


# Gradients are compared relative to their own scale, but at least this share of the largest one's.
_LEAST_SHARE = 1e-3
# Scale of the noise that is added to weights that are initially constant.
_NOISE = 0.05

_BY_DROPOUT = (
    "without dropout all is equal: dropout's random numbers differ. A manual region must draw the "
    "mask of the whole tensor and pass it in, or draw it outside"
)
# The parts of a state whose arrays are compared relative to how far the step moved them.
_KINDS = {"theta": "new weight", "moments": "new weight", "averages": "average"}


def verify_experiment(
    experiment: Params, options: VerifyOptions, progress: Progress = SILENT
) -> findings.Verification:
    """Compares an experiment's training step over a mesh with the same step on one device.

    Raises:
      UserError: there is no mesh, or a hyperparameter or name is wrong.
    """
    started = time.monotonic()
    wanted = experiments.requested_mesh(experiment, options.mesh, options.device_order)
    if wanted is None:
        raise UserError("`mesh` is missing, such as `mesh=data=4,model=2`")
    asked = experiments.requested_partitioning(experiment, wanted, options.strategy)
    check(experiment.step, asked, None)
    progress.begin("Building the model")
    small = shrinking.shrink(experiment, asked, options)
    partitioning = dataclasses.replace(asked, mesh=small.mesh)
    partitioning = partitioning.on(interpreted(options.kernels or ""))
    scales_loss = precision.get(experiment.step.precision).scales_loss
    case = _Case(small.params, partitioning, options, scales_loss)
    partitioned, whole = case.run(progress)
    compared = _compare(partitioned, whole, case)
    mesh = case.partitioning.mesh

    def along(axes: tuple[str, ...]) -> list[findings.Compared]:
        progress.begin(f"They differ. Trying {' and '.join(axes)} alone")
        return _compare(case.run_partitioned(mesh.along(axes)), whole, case)

    is_wrong = not all(row.is_equal for row in compared)
    by_dropout = False
    without, off = shrinking.without_dropout(small.params)
    if is_wrong and options.dropout and off:
        plain = _Case(without, partitioning, options, scales_loss)
        progress.begin("They differ. Trying without dropout")
        by_dropout = all(each.is_equal for each in _compare(*plain.run(progress), plain))
    layers, runs_again = case.trainer.task.layer_paths(), None if by_dropout else along
    first = find_first(compared, partitioned, whole, layers, mesh, runs_again)
    first = msgspec.structs.replace(first, likely=_BY_DROPOUT) if first and by_dropout else first
    if case.workers:
        rows, wrong = _compare_outer_step(case, case.workers, progress)
        compared, first = [*compared, *rows], first or wrong
    return findings.Verification(
        subject=experiment.name,
        mesh=str(partitioning.mesh),
        strategy=partitioning.strategy.to_text(),
        notes=(*small.notes, *steps.notes(partitioned, whole)),
        tolerance=options.tolerance,
        compared=tuple(compared),
        first=first,
        seconds=time.monotonic() - started,
        not_verified=small.not_verified,
    )


class _Case:
    """A trainer with a state and a batch, to be run partitioned and whole.

    With local updates, the first worker takes the step, on its own rows and its own part of the
    mesh.
    """

    def __init__(
        self, params: Params, partitioning: Partitioning, options: VerifyOptions, scales_loss: bool
    ):
        params = params.copy()
        params.step.seed = options.seed
        self.trainer: Trainer = experiments.make_trainer(params)
        if scales_loss:
            loss_scale = params.step.loss_scale.instantiate()
            self.trainer.parts[loss_scale.name] = loss_scale
        experiments.check_overrides(partitioning, self.trainer)
        self.partitioning, self.options = partitioning, options
        self.partitioner = experiments.requested_partitioner(params, options.partitioner)
        self.batch = _batch(params, self.trainer)
        self.workers: Workers | None = None
        check(params.step, partitioning, len(next(iter(self.batch.values()))))
        if params.step.local_updates.every:
            self.workers = Workers(partitioning, devices_for(partitioning.mesh.size))
            self.partitioning = self.workers.partitioning
            self.batch = self.workers.rows_of(self.batch, 0)
        middle = max(self.trainer.steps // 2, 1)
        self.state = noisy_state(self.trainer, options.seed, middle)

    def run_partitioned(self, mesh: Mesh) -> steps.ObservedStep:
        """Returns the step over a mesh with the axes of the partitioning."""
        partitioning = dataclasses.replace(self.partitioning, mesh=mesh)
        made_of = self.state, self.batch, self.partitioner
        return steps.run_step(self.trainer, partitioning, devices_for(mesh.size), *made_of)

    def run(self, progress: Progress) -> tuple[steps.ObservedStep, steps.ObservedStep]:
        """Returns the partitioned step and the whole one."""
        mesh = self.partitioning.mesh
        progress.begin(f"Compiling and running the step over {mesh.size} devices")
        partitioned = self.run_partitioned(mesh)
        progress.begin("Compiling and running the step on one device")
        made_of = self.state, self.batch, self.partitioner
        alone = dataclasses.replace(self.partitioning, mesh=mesh.along(()))
        gradients = [np.asarray(value) for _, value in partitioned.gradients.values()]
        whole = steps.run_step(self.trainer, alone, devices_for(1), *made_of, gradients)
        return partitioned, whole


def _batch(params: Params, trainer: Trainer) -> Batch:
    """Returns a synthetic batch; the first one of the input if the task cannot describe its ids."""
    try:
        batch = synthetic.make_batch(experiments.batch_specs(params), trainer.task.id_ranges())
    except ValueError:
        return experiments.first_batch(params.input.instantiate(), trainer.p.seed)
    for name, array in batch.items():
        if name.endswith("segments"):
            # Rows end at different positions, so that devices have different numbers of tokens.
            rows, length = array.shape
            end = length - np.arange(rows) * (length // 2) // rows
            array[np.arange(length) >= end[:, None]] = 0
    return batch


def noisy_state(trainer: Trainer, seed: int, step: int) -> NestedMap:
    """Returns the state of a trainer before a step, NumPy arrays.

    Weights that are initially constant get noise, since a weight of zeros hides what is wrong
    before it.
    """
    state = trainer.init_state().transform(lambda x: np.array(x))
    state.step = np.array(step, np.int32)
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


def _compare(
    partitioned: steps.ObservedStep, whole: steps.ObservedStep, case: _Case
) -> list[findings.Compared]:
    """Returns the comparisons of all tensors of a step, in the order of their computation."""
    return steps.judged(_differences(partitioned, whole, case), case.options.tolerance)


def _differences(
    partitioned: steps.ObservedStep, whole: steps.ObservedStep, case: _Case
) -> steps.TensorDifferences:
    mesh = partitioned.executable.program.mesh
    yield from steps.output_differences(partitioned, whole, mesh)
    for name, value in partitioned.metrics.items():
        # Both optimizers get the gradients of the partitioned step. Comparing these tells nothing.
        # One device does not report what only a mesh has, such as rows over a bound.
        if name not in ("gradient_norm", "learning_rate") and name in whole.metrics:
            kind = "loss" if name == "loss" else "metric"
            numbers = np.array(value), np.array(whole.metrics[name])
            yield kind, name, findings.compare(*numbers, mesh)
    largest = max(float(np.abs(value).max(initial=0)) for _, value in whole.gradients.values())
    for path, (_, value) in partitioned.gradients.items():
        other = whole.gradients[path][1]
        yield "gradient", path, findings.compare(value, other, mesh, _LEAST_SHARE * largest)
    before = dict(zip(partitioned.state, case.state.flatten(), strict=True))
    for path, value in partitioned.state.items():
        kind, other = _KINDS.get(path.partition(".")[0]), whole.state[path]
        if kind:
            yield kind, path, findings.compare_update(value, other, before[path], mesh)
        else:
            yield "counter", path, findings.compare(value, other, mesh)


def _compare_outer_step(
    case: _Case, workers: Workers, progress: Progress
) -> tuple[list[findings.Compared], findings.Finding | None]:
    """Returns what the outer step of local updates changes, compared, and the first difference."""
    progress.begin(f"Compiling and running the outer step of {workers.count} workers")
    mesh, devices = workers.together, workers.all_devices
    alone = dataclasses.replace(workers.everywhere, mesh=mesh.along(()))
    program, whole = (
        steps.in_float64(outer_step_program(case.trainer, workers.count, each, case.partitioner))
        for each in (workers.everywhere, alone)
    )
    before = _inputs(program, case.trainer, workers.count, case.state)
    executable = Executable(program, devices)
    partitioned = steps.run_on_arrays(executable, before, devices)
    expected = steps.run_on_arrays(Executable(whole, devices[:1]), before, devices[:1])
    paths = [array.path for array in program.outputs]
    weights = sum(path.startswith("theta.") for path in paths)
    # The first half are the workers' weights.
    names = [f"workers.{x}" if i < weights // 2 else x for i, x in enumerate(paths)]
    found = (
        ("outer weight", name, findings.compare_update(mine, its, old, mesh))
        for name, mine, its, old in zip(names, partitioned, expected, before, strict=False)
    )
    rows = steps.judged(found, case.options.tolerance)
    first = next((row for row in rows if not row.is_equal), None)
    if first is None:
        return rows, None
    layers = case.trainer.task.layer_paths()
    return rows, describe(Evidence(first, mesh), "", executable, layers)
