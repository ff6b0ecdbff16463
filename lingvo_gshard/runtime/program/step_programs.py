"""Makes the programs of a trainer: initial state, training step, evaluation step, functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lingvo_gshard.core import NestedMap, Seam, VariableSpec, known_sizes, tf, to_host
from lingvo_gshard.runtime.lowering.lowering import ProgramOutputs, check_layers, lower
from lingvo_gshard.runtime.program import padding
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.program import Program, Work
from lingvo_gshard.sharding import Partitioning, annotate_like
from lingvo_gshard.tasks.task import BatchSpecs, Task
from lingvo_gshard.training import Trainer, metric_vector
from lingvo_gshard.training.step.metric_vectors import Measurement, values_and_weights

_BATCH_LAYOUT = "BL"

# Functions that count the useful floating-point operations of a training step on a batch.
USEFUL_FLOPS: Seam[Callable[[Task, BatchSpecs], int]] = Seam("useful_flops")


def state_arrays(trainer: Trainer, partitioning: Partitioning) -> list[Array]:
    """Returns the arrays of the trainer's state as a flat list, with padding (padding.py)."""
    return [
        _state_array(path, spec, partitioning, trainer)
        for path, spec in trainer.state_specs().flatten_items()
    ]


def batch_arrays(specs: BatchSpecs, partitioning: Partitioning) -> list[Array]:
    """Returns the arrays of a batch in alphabetical order, split like activations.

    The first two dimensions are rows and positions. All others are whole.
    """
    arrays = []
    for name, spec in sorted(specs.items()):
        shape = tuple(known_sizes(spec.shape))
        split = partitioning.split(_BATCH_LAYOUT[: len(shape)])
        whole = ((),) * (len(shape) - len(split))
        split = partitioning.storage_split(shape, (*split, *whole))
        arrays.append(Array(f"batch.{name}", shape, spec.dtype.name, split))
    return arrays


def init_program(trainer: Trainer, partitioning: Partitioning, partitioner: str) -> Program:
    """Returns the program that draws the initial state, each shard on its own device."""
    arrays = state_arrays(trainer, partitioning)

    def init() -> list:
        state = annotated_state(trainer.init_state(), trainer)
        pairs = zip(arrays, state.flatten(), strict=True)
        placed = [to_host(value) if array.is_on_host else value for array, value in pairs]
        return _described(arrays, state.pack(placed))

    program = _lower("init_state", init, [], trainer, partitioning, partitioner)
    return _with_hosted(program, arrays)


def train_program(
    trainer: Trainer,
    partitioning: Partitioning,
    partitioner: str,
    batch: BatchSpecs,
    is_stacked: bool = False,
) -> tuple[Program, list[str]]:
    """Returns the training step and the names of its metrics.

    Inputs: state, batch. Outputs: state, and the metrics as one float32 vector. The memory of the
    state is donated.

    Args:
      is_stacked: whether the state's arrays have a first dimension of 1, as one worker's shares of
        arrays that are stacked over all workers.
    """
    arrays = state_arrays(trainer, partitioning)
    if is_stacked:
        arrays = [array.stacked(1) for array in arrays]
    names: list[str] = []

    def train_step(*tensors: tf.Tensor) -> list:
        flat = tensors[: len(arrays)]
        flat = [tf.squeeze(tensor, [0]) for tensor in flat] if is_stacked else flat
        state = annotated_state(_unpadded(flat, trainer.state_specs()), trainer)
        new_state, metrics = trainer.train_step(state, _batch(batch, tensors[len(arrays) :]))
        names[:], values = metric_vector(metrics.items())
        new_state = annotated_state(new_state, trainer)
        if is_stacked:
            new_state = new_state.transform(lambda tensor: tensor[None])
        return [*_described(arrays, new_state), ("metrics", values, ((),))]

    inputs = [*arrays, *batch_arrays(batch, partitioning)]
    donated = range(len(arrays))
    program = _lower("train_step", train_step, inputs, trainer, partitioning, partitioner, donated)
    program = dataclasses.replace(program, work=_work(trainer.task, batch))
    return _with_hosted(program, arrays), names


def eval_program(
    trainer: Trainer, partitioning: Partitioning, partitioner: str, batch: BatchSpecs
) -> tuple[Program, list[str]]:
    """Returns the evaluation step and the names of its metrics (`values_and_weights`).

    Inputs: the evaluated weights, batch. Output: the metrics as one float32 vector.
    """
    arrays = evaluated_arrays(state_arrays(trainer, partitioning), trainer)
    names: list[str] = []

    def eval_step(*tensors: tf.Tensor) -> list:
        theta = _evaluated_theta(tensors[: len(arrays)], trainer)
        pairs = trainer.eval_step(theta, _batch(batch, tensors[len(arrays) :]))
        names[:], values = metric_vector(values_and_weights(pairs))
        return [("metrics", values, ((),))]

    inputs = [*arrays, *batch_arrays(batch, partitioning)]
    return _lower("eval_step", eval_step, inputs, trainer, partitioning, partitioner), names


def measuring_program(
    trainer: Trainer,
    partitioning: Partitioning,
    partitioner: str,
    batch: BatchSpecs,
    function: Measurement,
) -> Program:
    """Returns the program of a function of the weights before a step and of a batch.

    Inputs: the weights, batch. Outputs: the function's results by name, whole on each device.

    Args:
      function: maps (theta, batch) to tensors by name.
    """
    arrays = [a for a in state_arrays(trainer, partitioning) if a.path.startswith("theta.")]

    def measure(*tensors: tf.Tensor) -> list:
        theta = _unpadded(tensors[: len(arrays)], trainer.theta_specs)
        theta = annotated_state(NestedMap(theta=theta), trainer).theta
        results = function(theta, _batch(batch, tensors[len(arrays) :]))
        return [(name, value, ((),) * value.shape.rank) for name, value in results.items()]

    inputs = [*arrays, *batch_arrays(batch, partitioning)]
    return _lower("measure", measure, inputs, trainer, partitioning, partitioner)


def function_program(
    trainer: Trainer,
    partitioning: Partitioning,
    partitioner: str,
    function: Callable[[NestedMap, tf.Tensor], tf.Tensor],
    ids: tf.TensorSpec,
) -> Program:
    """Returns the program of a function (theta, ids) -> tensor, with a replicated result."""
    arrays = evaluated_arrays(state_arrays(trainer, partitioning), trainer)

    def call(*tensors: tf.Tensor) -> list:
        theta = trainer.layer_weights(_evaluated_theta(tensors[:-1], trainer))
        result = function(theta, tensors[-1])
        return [("result", result, ((),) * result.shape.rank)]

    inputs = [*arrays, *batch_arrays({"ids": ids}, partitioning)]
    return _lower("function", call, inputs, trainer, partitioning, partitioner)


def _lower(
    name: str,
    function: Callable[..., ProgramOutputs],
    inputs: Sequence[Array],
    trainer: Trainer,
    partitioning: Partitioning,
    partitioner: str,
    donated: Sequence[int] = (),
) -> Program:
    """Returns a function as a Program; refuses before tracing what cannot be partitioned."""
    check_layers(trainer.task, partitioning.mesh, partitioner)
    return lower(name, function, inputs, partitioning, donated, partitioner)


def evaluated_arrays(arrays: Sequence[Array], trainer: Trainer) -> list[Array]:
    """Returns the arrays of a state that hold the evaluated weights."""
    return [array for array in arrays if array.path.startswith(f"{trainer.evaluated_part}.")]


def annotated_state(state: NestedMap, trainer: Trainer) -> NestedMap:
    """Returns the state with sharding annotations on all tensors of its sharded parts.

    An annotation of an array in host memory would copy it.
    """
    specs = trainer.state_specs()
    marked = NestedMap(state)
    for part, kind in trainer.sharded_parts.items():
        if part in state:
            pairs = zip(state[part].flatten(), specs[part].flatten(), strict=True)
            marked[part] = state[part].pack(
                tensor if trainer.is_on_host(part, spec) else annotate_like(tensor, spec, kind)
                for tensor, spec in pairs
            )
    return marked


def _work(task: Task, batch: BatchSpecs) -> Work:
    """Returns the useful work of a training step, to be saved with its program."""
    vocabularies = ((f"batch.{name}", size) for name, size in task.id_ranges().items())
    flops = sum(count(task, batch) for count in USEFUL_FLOPS)
    return Work(flops, task.tokens(batch), tuple(vocabularies))


def _state_array(
    path: str, spec: VariableSpec, partitioning: Partitioning, trainer: Trainer
) -> Array:
    """Returns an array of the state. Arrays in host memory have no padding to cut off."""
    part = path.partition(".")[0]
    kind = trainer.sharded_parts.get(part, "weights")
    if trainer.is_on_host(part, spec):
        split = partitioning.storage_split(spec.shape, partitioning.spec_split(spec, kind))
        return Array(path, spec.shape, spec.dtype, split, is_on_host=True)
    split = partitioning.spec_storage_split(spec, kind)
    return Array(path, partitioning.stored_shape(spec.shape, split), spec.dtype, split)


def _with_hosted(program: Program, arrays: Sequence[Array]) -> Program:
    """Returns a program whose outputs are in host memory where the state's arrays are."""
    hosted = {array.path for array in arrays if array.is_on_host}
    outputs = [
        dataclasses.replace(output, is_on_host=True) if output.path in hosted else output
        for output in program.outputs
    ]
    return dataclasses.replace(program, outputs=tuple(outputs))


def _unpadded(tensors: Sequence[tf.Tensor], specs: NestedMap) -> NestedMap:
    """Returns stored tensors as a tree like `specs`, without padding."""
    pairs = zip(tensors, specs.flatten(), strict=True)
    return specs.pack(padding.cut(tensor, spec.shape) for tensor, spec in pairs)


def _evaluated_theta(tensors: Sequence[tf.Tensor], trainer: Trainer) -> NestedMap:
    """Returns the evaluated weights, annotated, from the tensors of the state's evaluated part."""
    part = trainer.evaluated_part
    values = _unpadded(tensors, trainer.theta_specs)
    values = annotated_state(NestedMap({part: values}), trainer)[part]
    if part == "theta":
        return values
    theta = trainer.evaluated_theta(values)
    return annotated_state(NestedMap(theta=theta), trainer).theta


def _described(arrays: Sequence[Array], state: NestedMap) -> list:
    """Returns the state as the outputs that `lower` takes: (path, tensor, split)."""
    pairs = zip(arrays, state.flatten(), strict=True)
    return [(a.path, padding.padded(x, a.shape), a.split) for a, x in pairs]


def _batch(specs: BatchSpecs, tensors: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
    return dict(zip(sorted(specs), tensors, strict=True))
