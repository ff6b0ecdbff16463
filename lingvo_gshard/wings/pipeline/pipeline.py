"""Pipeline: a stack of layers cut into stages that run on different devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from lingvo_gshard.core import (
    Iteration,
    Layer,
    NestedMap,
    Params,
    RematUnit,
    Repetition,
    Reports,
    UserError,
    VariableSpec,
    context,
    layer_method,
    names,
    remat_policy,
    stop_frozen,
    tf,
)
from lingvo_gshard.layers import Execution, PartInputs, Sequential, add_reports
from lingvo_gshard.sharding import annotate, annotate_like, current_partitioning, use_partitioning
from lingvo_gshard.wings.pipeline.pipeline_loop import STAGES, PipelineLoop
from lingvo_gshard.wings.pipeline.pipeline_operands import Schedule

LOCAL_LETTERS = {"m": "micro-batches"}


class Pipeline(Execution):
    """Runs layers in stages (letter P). A batch passes the stages in micro-batches.

    A micro-batch has the results of a part in batch_parts.py.

    Weights are stacked over P and over R, the iterations of the body in a stage. Each layer has the
    initial weights, random numbers and metric names that it would have without stages. With c
    circulations, the layers are cut into c P chunks, and stage s runs chunks s, P + s, 2 P + s, ...

    Layers that do not divide into chunks run before all stages, on the whole batch, in `first`.
    """

    @classmethod
    def splits_shared(cls, params: Params) -> bool:
        """Returns True: every micro-batch has its own rows."""
        del params
        return True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("stages", 2, "Number of stages, the size of P.", minimum=1)
        p.define("micro_batches", 0, "Micro-batches of a batch; 0: as many as stages.", minimum=0)
        p.define(
            "circulations", 1, "Chunks of layers in a stage; micro-batches pass all.", minimum=1
        )
        p.define("first", (), "Params of the layers before all stages. Set by the stack.")
        return p

    @classmethod
    def for_layers(cls, params: Params, layers: Sequence[Params], period: int, path: str) -> Params:
        """Returns a copy of the Params of a pipeline that runs `layers`; see the base class.

        Raises:
          UserError: the options do not fit one another, or a layer cannot run in a pipeline.
        """
        if remat_policy.is_offloaded(params.rematerialize):
            raise UserError(
                f"{path}.rematerialize is {params.rematerialize!r}, but a Pipeline keeps what its "
                "stages save on the devices. "
                f"{names.nearest(params.rematerialize, remat_policy.ON_DEVICE)}"
            )
        if params.interleaved > 1:
            raise UserError(
                f"{path}.interleaved={params.interleaved}: a Pipeline computes several "
                f"micro-batches at a time, in different stages; set {path}.micro_batches instead"
            )
        result = super().for_layers(params, layers, period, path)
        result.micro_batches = params.micro_batches or params.stages
        least = params.stages if params.circulations > 1 else 1
        if result.micro_batches < least:
            raise UserError(
                f"{path}.micro_batches: {params.micro_batches}; {least} or more were expected with "
                f"{path}.stages={params.stages} and {path}.circulations={params.circulations}"
            )
        chunks = params.stages * params.circulations
        if result.times < chunks:
            raise UserError(
                f"{path}.stages={params.stages} with {path}.circulations={params.circulations}: "
                f"{result.times} times {period} layers are too few for {chunks} chunks"
            )
        rest = result.times % chunks
        result.set(first=tuple(layers[: rest * period]), times=result.times - rest)
        for layer in result.body:
            parts = [layer, *(layer.get(n) for n in ("self_attention",) if n in layer)]
            found = (each.cls.vectorization_obstacle(each) for each in parts)
            if obstacle := next(filter(None, found), ""):
                raise UserError(
                    f"{path}: a Pipeline computes its stages as one operation, which is not "
                    f"possible with {obstacle}"
                )
        return result

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        self.repetition = _Later(path, len(p.body), p.times, len(p.first) // len(p.body))
        if p.first:
            first = Sequential.params().set(rematerialize=p.rematerialize, body=p.first, times=1)
            self.create_child("first", first)
        self.schedule = Schedule(p.stages, p.micro_batches or p.stages, p.circulations)
        iterations = np.arange(p.times).reshape(p.circulations, p.stages, -1)
        # The iterations of the body that each stage runs, in order.
        self._iterations_PR = iterations.swapaxes(0, 1).reshape(p.stages, -1)

    def variable_specs(self) -> NestedMap:
        """Returns the VariableSpecs. Weights of the body have leading dimensions P and R."""
        specs = self._body_specs().transform(self._stacked)
        if self.p.first:
            specs.first = self.first.variable_specs()
        return specs

    def _body_specs(self) -> NestedMap:
        return _without_first(super().variable_specs())

    def _stacked(self, spec: VariableSpec) -> VariableSpec:
        paths = self.repetition.paths(spec.path)
        return dataclasses.replace(
            spec,
            layout=f"PR{spec.layout}",
            shape=(*self._iterations_PR.shape, *spec.shape),
            slices=tuple(paths[iteration] for iteration in self._iterations_PR.flat),
        )

    def _join(self, name: str) -> str:
        return self.path if name == "first" else super()._join(name)

    @layer_method
    def unrolled(self, theta: NestedMap) -> list[tuple[Layer, NestedMap]]:
        iterations = range(self.p.times)
        first = self.first.unrolled(theta.first) if self.p.first else []
        return first + [pair for i in iterations for pair in self._body_of_iteration(theta, i)]

    def layer_counts(self) -> list[tuple[Layer, int]]:
        return [(layer, 1) for layer in self._first_layers] + super().layer_counts()

    def layers_in_order(self) -> list[Layer]:
        return self._first_layers + super().layers_in_order()

    @property
    def _first_layers(self) -> list[Layer]:
        return list(self.first.body) if self.p.first else []

    @layer_method
    def _body_of_iteration(self, theta: NestedMap, i: int) -> list[tuple[Layer, NestedMap]]:
        stage, r = (int(index) for (index,) in np.nonzero(self._iterations_PR == i))
        # Slices need annotations of their own.
        theta = _without_first(theta)
        pairs = zip(theta.flatten(), self._body_specs().flatten(), strict=True)
        weights = theta.pack(annotate_like(weight[stage, r], spec) for weight, spec in pairs)
        return list(zip(self.body, weights.body, strict=True))

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, *shared: object) -> tf.Tensor:
        """Returns [B,L,M]; see the base class.

        The tensors in `shared` must have B rows. A batch whose rows do not divide into
        micro-batches is padded with zeros.
        """
        if self.p.first:
            x_BLM = self.first.fprop(theta.first, x_BLM, *shared)
        theta = _without_first(theta)
        rows, count = x_BLM.shape[0], self.schedule.micro_batches
        inputs = PartInputs.of(shared)
        tensors = [x_BLM, *tf.nest.flatten(inputs)]
        split = [_split(_pad_rows(tensor, -rows % count), count) for tensor in tensors]
        run = self._run_one_by_one if tf.executing_eagerly() else self._run_in_stages
        y_mBLM = run(theta, *split, structure=inputs)
        y_BLM = tf.reshape(tf.transpose(y_mBLM, (1, 0, 2, 3)), [-1, *x_BLM.shape[1:]])
        return annotate(y_BLM[:rows], "BLM")

    def check_batch(self, rows: int, path: str) -> None:
        """Raises UserError unless micro-batches divide the rows and devices divide the stages."""
        count, stages = self.schedule.micro_batches, self.schedule.stages
        partitioning = current_partitioning()
        axes = partitioning.split(STAGES)[0] if partitioning else ()
        parts = partitioning.parts(axes) if partitioning else 1
        if partitioning is not None and stages % parts:
            raise UserError(
                f"{path}.stages={stages} does not divide over the {parts} devices along "
                f"{', '.join(axes)} of `mesh={partitioning.mesh}`"
            )
        if rows % count and context.current().training:
            raise UserError(
                f"{path}.micro_batches={count} does not divide input.batch_rows, {rows} rows"
            )

    @layer_method
    def _run_in_stages(
        self, theta: NestedMap, x_mBLM: tf.Tensor, *inputs: tf.Tensor, structure: PartInputs
    ) -> tf.Tensor:
        """Runs all micro-batches through the compiled pipeline; `inputs` are flattened."""
        specs = self._body_specs()

        def run_body(x_BLM: tf.Tensor, *tensors: tf.Tensor) -> tf.Tensor:
            layer_inputs, micro_batch = tensors[: len(inputs)], tensors[len(inputs)]
            weights = specs.pack(stop_frozen(specs.flatten(), tensors[len(inputs) + 1 :]))
            layers = zip(self.body, weights.body, strict=True)
            packed = tf.nest.pack_sequence_as(structure, layer_inputs)
            return _run_layers(layers, x_BLM, packed, micro_batch)

        body = RematUnit(run_body, self.p.rematerialize)
        loop = PipelineLoop(body, self.schedule, self.repetition, specs.flatten())
        y_mBLM, reports, values = loop.run(x_mBLM, inputs, theta.flatten())
        indices = self._report_indices()
        self._report(reports, [tf.gather_nd(value, indices) for value in values])
        return y_mBLM

    def _report_indices(self) -> np.ndarray:
        """Returns the indices of useful reports.

        The result is int [times, micro_batches, 2]: for each iteration of the body and each
        micro-batch, its index in values of shape [runs of a stage, P].
        """
        busy = self.schedule.busy_ticks()[:, :, None]
        per_tick = self._iterations_PR.shape[1] // self.p.circulations
        runs = busy * per_tick + np.arange(per_tick)[:, None]
        stages = np.broadcast_to(np.arange(self.p.stages)[:, None, None], runs.shape)
        return np.stack([runs, stages], -1).reshape(self.p.times, -1, 2)

    @layer_method
    def _run_one_by_one(
        self, theta: NestedMap, x_mBLM: tf.Tensor, *inputs: tf.Tensor, structure: PartInputs
    ) -> tf.Tensor:
        """Runs layer after layer on each micro-batch: in eager mode no loop is compiled."""
        forward_pass = context.current()
        micro_batches, values = tf.unstack(x_mBLM), []
        for iteration in range(self.p.times):
            layers, values_here = self._body_of_iteration(theta, iteration), []
            for i, x_BLM in enumerate(micro_batches):
                here = Iteration(self.repetition, iteration)
                with context.use(forward_pass.part(here)) as part:
                    packed = tf.nest.pack_sequence_as(structure, [x[i] for x in inputs])
                    micro_batches[i] = _run_layers(layers, x_BLM, packed, tf.constant(i))
                reports = Reports.of(part)
                values_here.append(reports.values)
            values.append(values_here)
        reported = range(len(values[0][0]))
        by_name = [tf.stack([[v[k] for v in here] for here in values]) for k in reported]
        self._report(reports, by_name)
        return tf.stack(micro_batches)

    def _report(self, reports: Reports, values: Sequence[tf.Tensor]) -> None:
        """Reports means and sums over all micro-batches of values [times, micro_batches, ...]."""
        add_reports(context.current(), reports.stacked(self.repetition), values, 1)


@dataclasses.dataclass(frozen=True)
class _Later(Repetition):
    """The loop of a pipeline, after the iterations that run before it."""

    first: int

    def paths(self, path: str) -> list[str]:
        whole = Repetition(self.path, self.body, self.first + self.times)
        return whole.paths(path)[self.first :]

    def stacked(self, path: str) -> str:
        before, colons, after = super().stacked(path).partition("::")
        name, _, position = before.rpartition("[")
        return f"{name}[{int(position) + self.first * self.body}{colons}{after}"


def _without_first(tree: NestedMap) -> NestedMap:
    """Returns what belongs to the layers of the stages."""
    return NestedMap({name: value for name, value in tree.items() if name != "first"})


def pipelines(layer: Layer) -> Iterator[Pipeline]:
    """Yields the pipelines among a layer and its descendants."""
    yield from (each for each in layer.all_layers() if isinstance(each, Pipeline))


def _run_layers(
    layers: Sequence[tuple[Layer, NestedMap]],
    x_BLM: tf.Tensor,
    inputs: PartInputs,
    micro_batch: tf.Tensor,
) -> tf.Tensor:
    """Runs layers on one micro-batch, with random numbers that depend on its index."""
    with inputs.in_use(micro_batch):
        x_BLM = annotate(x_BLM, "BLM")
        for layer, theta in layers:
            x_BLM = layer.fprop(theta, x_BLM, *inputs.shared)
        return annotate(x_BLM, "BLM")


def _pad_rows(tensor: tf.Tensor, missing: int) -> tf.Tensor:
    if not missing:
        return tensor
    return tf.pad(tensor, [[0, missing]] + [[0, 0]] * (tensor.shape.rank - 1))


def _split(tensor: tf.Tensor, count: int) -> tf.Tensor:
    """Splits a batch, whose rows m divides, into m = `count` micro-batches [m,B,...].

    Micro-batch i consists of rows i, i + m, i + 2 m and so on, so that each device contributes
    equally to every micro-batch. All stages need all micro-batches, so rows that are also split
    over the stages are gathered.
    """
    partitioning = current_partitioning()
    with use_partitioning(partitioning and partitioning.within_stack(STAGES)):
        tensor = _annotate_rows(tensor, "B")
        rows, *shape = tensor.shape
        by_micro_batch = tf.reshape(tensor, [rows // count, count, *shape])
        order = [1, 0, *range(2, len(shape) + 2)]
        return _annotate_rows(tf.transpose(by_micro_batch, order), "mB")


def _annotate_rows(tensor: tf.Tensor, leading: str) -> tf.Tensor:
    """Annotates a tensor as split by B only; `leading` are its first letters."""
    layout = (leading + "LKM")[: tensor.shape.rank]
    return annotate(tensor, layout, unsplit=layout.replace("B", ""))
