"""Pipeline: a stack of like layers cut into stages that compute side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from lingvo_gshard.core import context, random_numbers
from lingvo_gshard.core.autodiff.remat_unit import RematUnit, Reports
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import Layer, VariableSpec, layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.repetition import Iteration, Repetition
from lingvo_gshard.layers.stacks.execution import Execution
from lingvo_gshard.layers.stacks.pipeline_loop import STAGES, PipelineLoop
from lingvo_gshard.layers.stacks.pipeline_schedule import Schedule
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.partitioning import current_partitioning, use_partitioning


class _MicroBatchInputs(NamedTuple):
    """What the layers read of a micro-batch besides their input.

    Attributes:
      shared: nests of tensors that every layer is called with.
      token_ids: one tensor, that of the context; empty if it has none.
    """

    shared: tuple
    token_ids: tuple[tf.Tensor, ...]


class Pipeline(Execution):
    """`body`, a layer or several that take turns, run `times` times, in stages (letter P).

    Computes what the layers one after another would of each micro-batch by itself: experts are
    routed micro-batch by micro-batch, losses and metrics are means over them, and what is drawn at
    random differs from one to the next, as with `trainer.micro_batches`.

    A weight is a stack over P and R, the body's times in a stage. As in `Repeat` each layer's part
    begins, draws random numbers and reports metrics by the name that the layer would have by
    itself. With c circulations stage s has chunks s, P + s, 2 P + s, ... of the c P that the layers
    are cut into.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("stages", 2, "Number of stages, the size of P.")
        p.define("micro_batches", 0, "Number of micro-batches of a batch; 0: as many as stages.")
        p.define(
            "circulations",
            1,
            "Number of chunks of layers in a stage: each micro-batch passes all stages that often.",
        )
        return p

    @classmethod
    def for_layers(cls, params: Params, layers: Sequence[Params], period: int, path: str) -> Params:
        """Returns a copy of the Params of a pipeline that runs `layers`; see the base class.

        Raises:
          ValueError: the options do not fit one another, or a layer cannot run in a pipeline.
        """
        result = super().for_layers(params, layers, period, path)
        result.micro_batches = params.micro_batches or params.stages
        for name in ("stages", "circulations"):
            if params.get(name) < 1:
                raise ValueError(f"{path}.{name}: {params.get(name)}; 1 or more was expected")
        least = params.stages if params.circulations > 1 else 1
        if result.micro_batches < least:
            raise ValueError(
                f"{path}.micro_batches: {params.micro_batches}; {least} or more were expected with "
                f"{path}.stages={params.stages} and {path}.circulations={params.circulations}"
            )
        chunks = params.stages * params.circulations
        if result.times % chunks:
            raise ValueError(
                f"{path}.stages={params.stages} with {path}.circulations={params.circulations}: "
                f"{result.times} times {period} layers do not divide into {chunks} chunks"
            )
        for layer in result.body:
            obstacle = layer.cls.vectorization_obstacle(layer)
            if obstacle:
                raise ValueError(
                    f"{path}: a Pipeline computes its stages as one operation, which is not "
                    f"possible with {obstacle}"
                )
        return result

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        chunks = p.stages * p.circulations
        if chunks < 1 or p.times % chunks:
            raise ValueError(
                f"{path}: {p.times} times a body of {len(p.body)} layers, in {p.stages} stages and "
                f"{p.circulations} circulations"
            )
        self.schedule = Schedule(p.stages, p.micro_batches or p.stages, p.circulations)
        self._repetition = Repetition(path, len(p.body), p.times)
        times = np.arange(p.times).reshape(p.circulations, p.stages, -1)
        # The times through all layers that each stage runs, in order.
        self._times_PR = times.swapaxes(0, 1).reshape(p.stages, -1)

    def variable_specs(self) -> NestedMap:
        """Returns the body's tree of VariableSpec, each with P and R before its dimensions."""
        return super().variable_specs().transform(self._stacked)

    def _stacked(self, spec: VariableSpec) -> VariableSpec:
        paths = self._repetition.paths(spec.path)
        return dataclasses.replace(
            spec,
            layout=f"PR{spec.layout}",
            shape=(*self._times_PR.shape, *spec.shape),
            slices=tuple(paths[time] for time in self._times_PR.flat),
        )

    @layer_method
    def unrolled(self, theta: NestedMap) -> list[tuple[Layer, NestedMap]]:
        """Returns the layers of the body with their weights, one after another, time after time."""
        return [pair for time in range(self.p.times) for pair in self._body_at(theta, time)]

    @layer_method
    def _body_at(self, theta: NestedMap, time: int) -> list[tuple[Layer, NestedMap]]:
        stage, r = (int(i) for (i,) in np.nonzero(self._times_PR == time))
        there = theta.transform(lambda weight: weight[stage, r])
        return list(zip(self.body, there.body, strict=True))

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, *shared: object) -> tf.Tensor:
        """Returns [B,L,M]: x through all layers, each called with (theta, x, *shared).

        Rows that do not divide into micro-batches are padded with zeros.

        Args:
          theta: weights of all layers.
          x_BLM: input of the first layer.
          *shared: nests of tensors of B rows that every layer reads.
        """
        rows, count = x_BLM.shape[0], self.schedule.micro_batches
        ids = context.current().token_ids
        inputs = _MicroBatchInputs(shared, () if ids is None else (ids,))
        tensors = [x_BLM, *tf.nest.flatten(inputs)]
        cut = [_cut(_padded(tensor, -rows % count), count) for tensor in tensors]
        run = self._one_by_one if tf.executing_eagerly() else self._in_stages
        y_RBLM = run(theta, *cut, structure=inputs)
        y_BLM = tf.reshape(tf.transpose(y_RBLM, (1, 0, 2, 3)), [-1, *x_BLM.shape[1:]])
        return annotate(y_BLM[:rows], "BLM")

    def check_batch(self, rows: int, path: str) -> None:
        """Raises ValueError if a batch of `rows` cannot be run; path: of the Params.

        In training the micro-batches must divide the rows. The stages must divide over the devices
        that they are split over.
        """
        count, stages = self.schedule.micro_batches, self.schedule.stages
        partitioning = current_partitioning()
        axes = partitioning.split(STAGES)[0] if partitioning else ()
        parts = partitioning.parts(axes) if partitioning else 1
        if stages % parts:
            raise ValueError(
                f"{path}.stages={stages} does not divide over the {parts} devices along "
                f"{', '.join(axes)} of --mesh={partitioning.mesh}"
            )
        if rows % count and context.current().training:
            raise ValueError(
                f"{path}.micro_batches={count} does not divide input.batch_rows, {rows} rows"
            )

    @layer_method
    def _in_stages(
        self, theta: NestedMap, x_RBLM: tf.Tensor, *inputs: tf.Tensor, structure: _MicroBatchInputs
    ) -> tf.Tensor:
        specs = super().variable_specs()

        def body(x_BLM: tf.Tensor, *tensors: tf.Tensor) -> tf.Tensor:
            here, number = tensors[: len(inputs)], tensors[len(inputs)]
            weights = specs.pack(tensors[len(inputs) + 1 :])
            layers = zip(self.body, weights.body, strict=True)
            return _run(layers, x_BLM, tf.nest.pack_sequence_as(structure, here), number)

        unit = RematUnit(body, self.p.rematerialize)
        loop = PipelineLoop(unit, self.schedule, self._repetition, specs.flatten())
        y_RBLM, reports, values = loop.run(x_RBLM, inputs, theta.flatten())
        places = self._places()
        self._report(reports, [tf.gather_nd(value, places) for value in values])
        return y_RBLM

    def _places(self) -> np.ndarray:
        """Where in values [T,P] those of each time and micro-batch are: [times, R, 2]."""
        used = self.schedule.busy_ticks()[:, :, None]
        per_tick = self._times_PR.shape[1] // self.p.circulations
        at = used * per_tick + np.arange(per_tick)[:, None]
        stages = np.broadcast_to(np.arange(self.p.stages)[:, None, None], at.shape)
        return np.stack([at, stages], -1).reshape(self.p.times, -1, 2)

    @layer_method
    def _one_by_one(
        self, theta: NestedMap, x_RBLM: tf.Tensor, *inputs: tf.Tensor, structure: _MicroBatchInputs
    ) -> tf.Tensor:
        """The layers one after another, where no loop is compiled."""
        pass_under_way = context.current()
        micro_batches, values = tf.unstack(x_RBLM), []
        for time in range(self.p.times):
            layers, found = self._body_at(theta, time), []
            for i, x_BLM in enumerate(micro_batches):
                with context.use(pass_under_way.part(Iteration(self._repetition, time))) as part:
                    here = tf.nest.pack_sequence_as(structure, [x[i] for x in inputs])
                    micro_batches[i] = _run(layers, x_BLM, here, tf.constant(i))
                reports = Reports.of(part)
                found.append(reports.values)
            values.append(found)
        by_name = [tf.stack([[v[k] for v in f] for f in values]) for k in range(len(found[0]))]
        self._report(reports, by_name)
        return tf.stack(micro_batches)

    def _report(self, reports: Reports, values: Sequence[tf.Tensor]) -> None:
        """Reports means over micro-batches of values [times, R], layer by layer."""
        losses, metrics = len(reports.losses), len(reports.metrics)
        weights = [tf.reduce_sum(weight, 1) for weight in values[losses + metrics :]]
        pairs = zip(values[losses:], values[losses + metrics :], strict=False)
        sums = [tf.reduce_sum(value * weight, 1) for value, weight in pairs]
        means = [tf.reduce_mean(loss, 1) for loss in values[:losses]]
        means += [tf.math.divide_no_nan(s, w) for s, w in zip(sums, weights, strict=True)]
        reports.stacked(self._repetition).add_to(context.current(), [*means, *weights])


def pipelines(layer: Layer) -> Iterator[Pipeline]:
    """Yields the pipelines among a layer and all below it."""
    if isinstance(layer, Pipeline):
        yield layer
    for child in layer.children.values():
        for one in child if isinstance(child, list) else [child]:
            yield from pipelines(one)


def _run(
    layers: Sequence[tuple[Layer, NestedMap]],
    x_BLM: tf.Tensor,
    inputs: _MicroBatchInputs,
    number: tf.Tensor,
) -> tf.Tensor:
    """One micro-batch through layers, with random numbers of its own."""
    now = context.current()
    if now.seed is not None:
        now = dataclasses.replace(now, seed=random_numbers.hashed_fold_in_word(now.seed, number))
    if inputs.token_ids:
        now = dataclasses.replace(now, token_ids=inputs.token_ids[0])
    with context.use(now):
        x_BLM = annotate(x_BLM, "BLM")
        for layer, theta in layers:
            x_BLM = layer.fprop(theta, x_BLM, *inputs.shared)
        return annotate(x_BLM, "BLM")


def _padded(tensor: tf.Tensor, missing: int) -> tf.Tensor:
    if not missing:
        return tensor
    return tf.pad(tensor, [[0, missing]] + [[0, 0]] * (tensor.shape.rank - 1))


def _cut(tensor: tf.Tensor, count: int) -> tf.Tensor:
    """[R,B,...]: R micro-batches, each of every R-th row, of all devices' rows an equal share.

    They are with all stages: rows that were split over those, too, are put together first.
    """
    partitioning = current_partitioning()
    with use_partitioning(partitioning and partitioning.within_stack(STAGES)):
        tensor = _by_rows(tensor, "B")
        rows, *shape = tensor.shape
        by_part = tf.reshape(tensor, [rows // count, count, *shape])
        order = [1, 0, *range(2, len(shape) + 2)]
        return _by_rows(tf.transpose(by_part, order), "RB")


def _by_rows(tensor: tf.Tensor, first: str) -> tf.Tensor:
    """The tensor, split along rows alone."""
    layout = (first + "LKM")[: tensor.shape.rank]
    return annotate(tensor, layout, unsplit=layout.replace("B", ""))
