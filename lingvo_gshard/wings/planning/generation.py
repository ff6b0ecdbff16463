"""Plans generation: one decoding step of all rows, and the prefill of the texts that enter.

Both are the programs that `gshard-generate` and `gshard-serve` run (inference/programs), compiled
for the topology as a training step is. A step of decoding reads every weight and every key and
value once, so the memory's bandwidth bounds it unless there are many rows.

Decoding programs have no loop over layers, since every layer has arrays of its own. Their compile
time grows with depth. Layers of one kind are equal, so each adds the same operations and bytes: a
plan is linear in the number of layers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

import msgspec

from lingvo_gshard.core import SILENT, Options, Params, Progress, TokenShape, UserError, option
from lingvo_gshard.runtime import Program, bytes_of, platform_of
from lingvo_gshard.sharding import Partitioning, weight_rows
from lingvo_gshard.tasks import TokenTask
from lingvo_gshard.training import experiments, make_trainer
from lingvo_gshard.wings.facts.flops import flops, token_task_flops
from lingvo_gshard.wings.facts.parameters import active_parameters
from lingvo_gshard.wings.inference.decoding.state import SearchKind, StateShape
from lingvo_gshard.wings.inference.loading import facts_of
from lingvo_gshard.wings.inference.programs.executables import ADMIT, PREPARE, STEPS, ProgramKey
from lingvo_gshard.wings.inference.programs.maker import (
    ProgramMaker,
    decoding_partitioning,
    row_parts,
)
from lingvo_gshard.wings.inference.programs.preparation import peak_bytes
from lingvo_gshard.wings.planning import memory, planner, roofline
from lingvo_gshard.wings.planning.experiments import PlanOptions, planned_partitioning
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.planning.plan.plan import (
    CollectiveRow,
    LayerRow,
    ParameterCounts,
    Plan,
    Record,
    TemporaryRow,
)
from lingvo_gshard.wings.planning.planned_program import PlannedProgram, layer_scopes
from lingvo_gshard.wings.planning.roofline import Budget

_Record = TypeVar("_Record", bound=msgspec.Struct)
# Numbers that say which operations a row is about, or what one array is.
_KEPT: dict[type, tuple[str, ...]] = {
    CollectiveRow: ("bytes",),
    LayerRow: ("times",),
    TemporaryRow: ("bytes",),
}


@dataclasses.dataclass(frozen=True)
class Depths:
    """The depths to plan in place of a model's own number of `layers`.

    `shallow` has the layers at the start that differ and whole periods of the others, `deeper` one
    period more.
    """

    shallow: int
    deeper: int
    layers: int

    @classmethod
    def of(cls, decoder: Params, least: int = 1) -> Depths | None:
        """Returns depths of `least` layers or more; None for a stack that is no deeper itself."""
        layers = decoder.num_layers
        period = math.lcm(max(decoder.moe_every, 1), len(decoder.attention_pattern) or 1)
        first = max(decoder.dense_first, decoder.sequential_first)
        # Layers stand in the same places of their period as in the whole model.
        shallow = first + (layers - first) % period + period
        shallow += period * math.ceil(max(least - shallow, 0) / period)
        return cls(shallow, shallow + period, layers) if shallow + period < layers else None

    @property
    def steps(self) -> float:
        """The number of layers beyond the first depth, in differences of the two depths."""
        return (self.layers - self.shallow) / (self.deeper - self.shallow)

    def extrapolated(self, first: Plan, second: Plan) -> Plan:
        """Returns the plan of all layers, extrapolated from the plans of the two depths."""
        found = _extrapolated(first, second, self.steps)
        memory = found.bytes_per_device
        bound = sum(row.seconds_bound for row in found.collectives)
        collectives = [
            msgspec.structs.replace(row, share=row.seconds_bound / bound if bound else 0.0)
            for row in found.collectives
        ]
        # The MFU of one useful operation per second.
        per_flop = (second.mfu or 0.0) * second.seconds_per_step / max(second.flops.useful, 1)
        return msgspec.structs.replace(
            found,
            fits=memory.peak <= memory.capacity,
            collectives=collectives,
            compile_seconds=first.compile_seconds + second.compile_seconds,
            steps_per_second=1 / found.seconds_per_step,
            steps_per_second_bound=1 / found.seconds_per_step_bound,
            tokens_per_second=(found.tokens_per_step or 0) / found.seconds_per_step,
            mfu=per_flop * found.flops.useful / found.seconds_per_step,
            notes=[
                f"extrapolated to {self.layers} layers from programs of {self.shallow} and of "
                f"{self.deeper} layers",
                *second.notes,
            ],
        )


def _extrapolated(first: _Record, second: _Record, steps: float) -> _Record:
    """Extrapolates the numbers of a record: first + steps * (second - first)."""
    kept = _KEPT.get(type(second), ())
    changes = {
        name: _value(getattr(first, name), getattr(second, name), steps)
        for name in second.__struct_fields__
        if name not in kept
    }
    return msgspec.structs.replace(second, **changes)


def _value(first: Any, second: Any, steps: float) -> Any:
    if isinstance(second, bool) or type(first) is not type(second):
        return second
    if isinstance(second, int | float):
        # A number that falls with the depth may come out below zero.
        value = max(first + steps * (second - first), 0)
        return round(value) if isinstance(second, int) else value
    if isinstance(second, msgspec.Struct):
        return _extrapolated(first, second, steps)
    if isinstance(second, list) and second and isinstance(second[0], msgspec.Struct):
        return _rows(first, second, steps)
    return second


def _rows(first: list[Any], second: list[Any], steps: float) -> list[Any]:
    """Returns the rows of the second list, each extrapolated from the same row of the first."""
    before = {_identity(row): row for row in first}
    return [
        _extrapolated(before.get(_identity(row), _without_calls(row)), row, steps) for row in second
    ]


def _identity(row: msgspec.Struct) -> tuple:
    """Returns what rows about the same operations share: their texts, and numbers of `_KEPT`."""
    kept = _KEPT.get(type(row), ())
    values = msgspec.structs.asdict(row)
    return tuple(v for name, v in values.items() if isinstance(v, str) or name in kept)


def _without_calls(row: msgspec.Struct) -> msgspec.Struct:
    """Returns a row of operations that a program lacks."""
    kept = _KEPT.get(type(row), ())
    values = msgspec.structs.asdict(row).items()
    zeros = {n: type(v)(0) for n, v in values if n not in kept and isinstance(v, int | float)}
    return msgspec.structs.replace(row, **zeros)


# The limits of a program, by the field of a layer's row that has the seconds.
_BOUNDS = {
    "memory_seconds": "memory bandwidth",
    "compute_seconds": "arithmetic",
    "communication_seconds": "communication",
}


class GenerationPlan(Record, frozen=True, kw_only=True):
    """The plan of generation on a machine: memory, time and cost.

    Attributes:
      length: positions that each text's keys and values are kept for.
      prompt: positions of the prompt of a text that enters.
      steps: tokens that one call of the decoding program adds to each text.
      fits: whether all planned programs fit in the memory of each device, and loading does.
      loading_bytes: the most bytes of a device while weights to decode with are made.
      cache_bytes: keys and values on one device.
      cache_bytes_per_text: keys and values of one text, on all devices together.
      step: a call of the decoding program, for texts that fill their `length` positions.
      bounded_by: what decoding spends most of its time on.
      prefill: the pass over the prompts of the texts that enter together; None if not planned.
      generated: cost of a million generated tokens, prompts left out.
      prompted: cost of a million tokens of prompts; None if not planned.
    """

    batch: int
    length: int
    prompt: int
    steps: int
    fits: bool
    loading_bytes: int
    cache_bytes: int
    cache_bytes_per_text: int
    step: Plan
    bounded_by: str
    prefill: Plan | None
    generated: Budget
    prompted: Budget | None

    @property
    def seconds_per_token(self) -> float:
        """Seconds between two tokens of a text."""
        return self.step.seconds_per_step / self.steps


def bounded_by(plan: Plan) -> str:
    """Returns the resource that bounds most of a program's time, such as "memory bandwidth"."""
    seconds = {name: sum(getattr(row, name) for row in plan.layers) for name in _BOUNDS}
    return _BOUNDS[max(seconds, key=lambda name: seconds[name])]


# The beginnings of the paths of a program's arrays.
_WEIGHTS, _CACHES = "weights.", "state.caches"
_GREEDY = SearchKind()
# A plan states the cost of generating this many tokens.
_MILLION = 1e6


@dataclasses.dataclass(frozen=True)
class GenerationOptions(Options):
    """Options for the texts to generate, and for planning the prefill, too."""

    batch: int = option(1, "Texts decoded together, on all devices.", minimum=1)
    prompt: int = option(
        0,
        "Positions of the prompt of the texts that enter; 0: half of those of a text, which are "
        "those of a row of the input.",
        minimum=0,
    )
    has_prefill: bool = True
    every_layer: bool = option(
        False,
        "Compiles all layers. Else deep models are extrapolated from two shallow ones, in a "
        "fraction of the time.",
    )


def plan_generation(
    experiment: Params,
    topology: Topology,
    options: PlanOptions,
    generation: GenerationOptions,
    progress: Progress = SILENT,
) -> GenerationPlan:
    """Returns the plan of generating with an experiment's language model on a topology.

    Args:
      experiment: the experiment's Params. Weights have the types of `step.precision`; a text has as
        many positions as a row of the input.

    Raises:
      UserError: the task decodes no text of its own, the batch or the prompt does not fit, or a
        training step could not be planned either.
    """
    partitioning = planned_partitioning(experiment, topology, options)
    experiments.check_overrides(partitioning, make_trainer(experiment))
    # Tracing takes long, so a missing compiler is reported first.
    topology.compile_devices()
    least = _least_layers(experiment, partitioning) if topology.compiler == "tpu" else 1
    depths = None if generation.every_layer else Depths.of(experiment.task.decoder, least)
    partitioner = experiments.requested_partitioner(experiment, options.partitioner)

    def plan_depth(layers: int) -> GenerationPlan:
        shallow = experiment.copy()
        shallow.task.decoder.num_layers = layers
        programs = _Programs(shallow, partitioning, partitioner, generation, topology, progress)
        return programs.plan()

    if depths is None:
        return plan_depth(experiment.task.decoder.num_layers)
    first, second = map(plan_depth, (depths.shallow, depths.deeper))
    step = depths.extrapolated(first.step, second.step)
    prefill = None
    if first.prefill and second.prefill:
        prefill = depths.extrapolated(first.prefill, second.prefill)
    known = {
        name: _value(getattr(first, name), getattr(second, name), depths.steps)
        for name in GenerationPlan.__struct_fields__
        if name != "fits" and isinstance(getattr(first, name), int)
    }
    return _plan_of(step, prefill, topology, **known)


# Bytes that the memory beside a TPU's cores has at most. Weights that fit are read once in a call,
# and a model of more layers reads its weights in every step.
_FAST_MEMORY = 128 * 2**20


def _least_layers(experiment: Params, partitioning: Partitioning) -> int:
    """Returns the number of layers whose weights take twice a TPU's fast memory."""
    decoder = make_trainer(experiment).task.decoder
    rows = weight_rows(decoder.variable_specs(), decoding_partitioning(partitioning))
    size = sum(row.bytes_per_device for row in rows) / decoder.p.num_layers
    return math.ceil(2 * _FAST_MEMORY / size)


def _plan_of(step: Plan, prefill: Plan | None, topology: Topology, **known: int) -> GenerationPlan:
    """Returns the plan of generation from the plans of the two programs, and its other numbers."""
    return GenerationPlan(
        fits=step.fits
        and (prefill is None or prefill.fits)
        and known["loading_bytes"] <= step.bytes_per_device.capacity,
        step=step,
        bounded_by=bounded_by(step),
        prefill=prefill,
        generated=_cost(step, topology),
        prompted=None if prefill is None else _cost(prefill, topology),
        **known,
    )


def _cost(plan: Plan, topology: Topology) -> roofline.Budget:
    """Returns the cost of a million tokens."""
    assert plan.tokens_per_step
    return roofline.budget(_MILLION, plan.seconds_per_step / plan.tokens_per_step, topology)


class _Programs:
    """Lowers and plans the programs of generation of one model."""

    def __init__(
        self,
        experiment: Params,
        partitioning: Partitioning,
        partitioner: str,
        generation: GenerationOptions,
        topology: Topology,
        progress: Progress,
    ):
        """Prepares to lower. Raises UserError if the task, the batch or the prompt does not fit."""
        task = make_trainer(experiment).task
        # The ids before and after a text are data; no tokenizer is needed to plan.
        facts = facts_of(task, experiment.input)
        assert isinstance(task, TokenTask)
        if facts.has_source:
            raise UserError(
                f"`generate` plans language models, and {type(task).__name__}, the task of "
                f"{experiment.name}, translates a source"
            )
        self._parts = row_parts(partitioning)
        self._prompt = _checked_prompt(generation, facts.most_positions, self._parts)
        self._batch, self._has_prefill = generation.batch, generation.has_prefill
        self._task, self._facts = task, facts
        self._partitioning = decoding_partitioning(partitioning)
        platform = platform_of(topology.compile_devices()[0])
        self._maker = ProgramMaker(task, facts, partitioning, partitioner, platform=platform)
        self._topology, self._progress = topology, progress

    def plan(self) -> GenerationPlan:
        """Returns the plan of the programs."""
        length = self._facts.most_positions
        shape = StateShape(self._batch, length)
        self._progress.begin("tracing and lowering a step of decoding")
        program = self._maker.make(ProgramKey(STEPS, _GREEDY, shape))
        tokens = self._batch * self._facts.most_steps
        last = self._row_flops(length) - self._row_flops(length - 1)
        step = self._plan(program, tokens, tokens * last)
        prefill = None
        if self._has_prefill:
            self._progress.begin("tracing and lowering the prefill")
            # As many as the devices compute at once, so that none repeats another's work.
            texts = self._parts if self._batch % self._parts == 0 else 1
            key = ProgramKey(ADMIT, _GREEDY, shape, texts, given=self._prompt)
            useful = texts * self._prefill_flops()
            prefill = self._plan(self._maker.make(key), texts * self._prompt, useful)
        caches = [array for array in program.inputs if array.path.startswith(_CACHES)]
        whole = sum(math.prod(array.shape) * array.struct.dtype.itemsize for array in caches)
        return _plan_of(
            step,
            prefill,
            self._topology,
            batch=self._batch,
            length=length,
            prompt=self._prompt,
            steps=self._facts.most_steps,
            loading_bytes=peak_bytes(self._maker.make(ProgramKey(PREPARE))),
            cache_bytes=sum(bytes_of(array, program.mesh) for array in caches),
            cache_bytes_per_text=whole // self._batch,
        )

    def _row_flops(self, length: int) -> int:
        return token_task_flops(self._task, TokenShape(rows=1, length=length))

    def _prefill_flops(self) -> int:
        """Returns the operations of a prompt, whose last layer and softmax nothing needs."""
        decoder, shape = self._task.decoder, TokenShape(rows=1, length=self._prompt)
        return flops(decoder, shape) - flops(decoder.layers_in_order()[-1], shape)

    def _plan(self, program: Program, tokens: int, useful: int) -> Plan:
        """Returns the plan of a program of `tokens` tokens that needs `useful` operations."""
        planned = PlannedProgram(
            program=program,
            name=program.name,
            classes=tuple(
                memory.WEIGHTS if array.path.startswith(_WEIGHTS) else memory.INPUTS
                for array in program.inputs
            ),
            layers=layer_scopes(self._task),
            tensors=(),
            parameters=ParameterCounts(
                total=sum(math.prod(s.shape) for s in self._task.variable_specs().flatten()),
                active=active_parameters(self._task),
            ),
            useful_flops=useful,
            tokens=tokens,
        )
        return planner.plan_program(
            planned, self._partitioning, self._topology, progress=self._progress
        )


def _checked_prompt(generation: GenerationOptions, length: int, parts: int) -> int:
    """Returns the positions of a prompt. Raises ValueError if the options are impossible."""
    if generation.batch > 1 and generation.batch % parts:
        raise UserError(
            f"`batch={generation.batch}`: the mesh decodes {parts} batches at once; expected 1 or "
            f"a multiple of {parts}"
        )
    prompt = generation.prompt or max(length // 2, 1)
    if prompt > length:
        raise UserError(f"`prompt={prompt:,}` is more than the {length:,} positions of a text")
    return prompt
