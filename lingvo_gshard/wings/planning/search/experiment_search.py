"""Searches for the mesh, strategy and rematerialization policy of an experiment."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import msgspec

from lingvo_gshard.core import SILENT, Options, Params, Progress, known_sizes, option, remat_policy
from lingvo_gshard.sharding import Mesh, Partitioning
from lingvo_gshard.tasks import BatchSpecs
from lingvo_gshard.training import experiments, make_trainer, precision
from lingvo_gshard.wings.compiler_options.table import ALL_TO_ALLS, PARALLEL, option_variants
from lingvo_gshard.wings.dropless.exchanges import LEAST_UPDATES
from lingvo_gshard.wings.facts.step import step_flops
from lingvo_gshard.wings.hlo.operations import Collective, Operation
from lingvo_gshard.wings.planning import planner, roofline
from lingvo_gshard.wings.planning.machines import efficiencies, interconnect
from lingvo_gshard.wings.planning.machines.chips import PLATFORMS
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.planning.plan.plan import Plan
from lingvo_gshard.wings.planning.roofline import Budget
from lingvo_gshard.wings.planning.search import choices, results
from lingvo_gshard.wings.planning.search.balanced_dispatch import BalancedDispatch
from lingvo_gshard.wings.planning.search.candidates import TracedStep
from lingvo_gshard.wings.planning.search.costs import Rates
from lingvo_gshard.wings.planning.search.search import search
from lingvo_gshard.wings.planning.search.tracing import trace

# Goals of a search.
TIME, COST = "time", "cost"
_BILLION = 1e9
# Numbers of micro-batches that a search tries.
_MICRO_BATCHES = (1, 2, 4, 8)
# Number of interleaved parts of a batch that a search tries.
_INTERLEAVED = 2
# Hyperparameter of tasks: the number of positions whose logits are computed at once.
_LOGITS = "logits_positions"
_ALL_POSITIONS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class SearchOptions(Options):
    """Options of a search."""

    search_compilations: int = option(
        4,
        "Number of candidates that a search compiles before it decides, the best by the cost model "
        "first; the best of them is then compiled with variants. 0 decides by the cost model "
        "alone.",
        minimum=0,
    )
    search_for: str = option(
        TIME,
        "Of several machines, the one that takes the least time for a step, or that costs the "
        "least by its list price.",
        choices=(TIME, COST),
    )
    search_precision: tuple[str, ...] = option(
        (),
        "Precision that a search may choose, such as bfloat16; may be repeated. It changes what is "
        "learned, so by default the search keeps step.precision.",
        choices=tuple(precision.precision_names()),
    )


def candidate_compiler(
    experiment: Params,
    paths: choices.ChoicePaths,
    batch: BatchSpecs,
    topology: Topology,
    plans: dict[choices.Candidate, Plan],
    progress: Progress = SILENT,
) -> results.CompileCandidate:
    """Returns a function that compiles a candidate for a topology and adds its plan to `plans`."""

    def compile_candidate(candidate: choices.Candidate) -> results.CompiledCost:
        params = candidate.params(experiment, paths)
        sharding = params.sharding
        partitioning = Partitioning.make(sharding.mesh, sharding.strategy, sharding.overrides)
        plan = planner.plan_step(
            make_trainer(params),
            batch,
            partitioning,
            topology,
            experiment.name,
            sharding.partitioner,
            progress=progress,
            compile_options=sharding.compile_options,
        )
        plans[candidate] = msgspec.structs.replace(plan, params=params.to_text())
        return results.CompiledCost(plan.fits, plan.bytes_per_device.peak, plan.seconds_per_step)

    return compile_candidate


def platform_of_kind(topology: Topology) -> str:
    """Returns the platform whose kernels a topology's programs have; "" for CPUs."""
    return PLATFORMS[topology.kind] if topology.kind != "cpu" else ""


_DTYPES = ("float32", "bfloat16", "float16")
# FLOPs of a matrix product that reaches the highest measured efficiency.
_LARGE = 1e13


def rates_of(topology: Topology) -> Rates:
    """Returns the estimated rates of one device of a topology."""
    chip = topology.chip
    share = efficiencies.matmul_efficiency(chip, _LARGE).value

    @functools.cache
    def collective_seconds(kind: str, bytes: int, axes: tuple[str, ...], mesh: Mesh) -> float:
        size = mesh.parts(axes)
        slices = interconnect.spanned_slices(axes, topology, mesh)
        call = Collective(kind, axes, size, "float32", bytes, slices=slices, updates=LEAST_UPDATES)
        operation = Operation("searched", kind, "", "other", collective=call)
        (timed,) = roofline.time_operations([operation], topology, mesh)
        return timed.seconds

    return Rates(
        flops_per_second={dtype: share * chip.peak(dtype) for dtype in _DTYPES},
        bytes_per_second=efficiencies.memory_efficiency(chip).value * chip.memory_bandwidth,
        capacity=chip.usable_bytes,
        collective_seconds=collective_seconds,
        host_bytes_per_second=chip.host_bandwidth,
        platform=platform_of_kind(topology),
    )


@dataclasses.dataclass(frozen=True)
class ExperimentSearch:
    """The result of a search for an experiment.

    Attributes:
      plan: plan of the best candidate; None if none was compiled or none fits.
      tokens: target positions of a batch.
    """

    experiment: Params
    topology: Topology
    result: results.SearchResult
    plan: Plan | None
    paths: choices.ChoicePaths
    tokens: int

    @property
    def billion_tokens(self) -> Budget | None:
        """The time and price of training on a billion tokens; None if no candidate fits."""
        if self.result.best is None:
            return None
        return roofline.budget(_BILLION, self.result.best.seconds / self.tokens, self.topology)

    def settings(self, row: results.RatedCandidate) -> list[str]:
        """Returns the settings that select a candidate."""
        return row.candidate.settings(self.paths)

    def params(self, row: results.RatedCandidate) -> Params:
        """Returns the experiment's Params with all choices of a candidate."""
        return row.candidate.params(self.experiment, self.paths)


def search_experiment(
    experiment: Params,
    topology: Topology,
    options: SearchOptions = SearchOptions(),
    progress: Progress = SILENT,
    partitioner: str | None = None,
    compile_options: Sequence[str] = (),
) -> ExperimentSearch:
    """Returns the fastest way to run an experiment's training step.

    Args:
      experiment: Params; their own mesh, strategy, rematerialization policies, place of the
        moments and number of micro-batches are ignored.
      progress: is told each event of the search, and each stage of a compilation.
      partitioner: "gspmd" or "shardy"; None: the experiment's.
      compile_options: changes to the compiler's options, as `plan_step` takes them; (): the
        experiment's.
    """
    experiment = experiment.copy()
    experiment.sharding.set(
        # The search proposes meshes for the order of the list of devices.
        device_order="contiguous",
        partitioner=experiments.requested_partitioner(experiment, partitioner),
        compile_options=experiments.requested_compile_options(experiment, compile_options),
    )
    paths, batch = choices.ChoicePaths.of(experiment), experiments.batch_specs(experiment)
    progress.say("tracing the model")
    steps = list(traced_steps(experiment, paths, batch, options.search_precision, topology))
    plans: dict[choices.Candidate, Plan] = {}
    compile_candidate, variants = None, []
    if options.search_compilations:
        compile_candidate = candidate_compiler(experiment, paths, batch, topology, plans, progress)
        variants = _variants(experiment, paths, steps[0], topology, batch)
    result = search(
        steps[0],
        topology.devices,
        rates_of(topology),
        compile_candidate,
        compile_best=options.search_compilations,
        savings=savings(paths, topology),
        torus=_torus(topology),
        progress=progress,
        others=steps[1:],
        variants=variants,
        seconds_bound=seconds_bound(experiment, batch, steps, topology),
    )
    plan = plans.get(result.best.candidate) if result.best else None
    tokens = make_trainer(experiment).task.target_tokens(batch)
    return ExperimentSearch(experiment, topology, result, plan, paths, tokens)


def seconds_bound(
    experiment: Params, batch: BatchSpecs, steps: Sequence[TracedStep], topology: Topology
) -> float:
    """Returns the time of the model's products at the peak of the fastest type of a step."""
    dtypes = {e.result.dtype for step in steps for e in step.einsums}
    peak = max(topology.chip.peak(dtype) for dtype in dtypes)
    return step_flops(make_trainer(experiment).task, batch) / (topology.devices * peak)


def savings(paths: choices.ChoicePaths, topology: Topology) -> list[choices.Saving]:
    """Returns what to try: in the memory of the host only where its bandwidth is known."""
    is_offloaded = (False, True) if topology.chip.host_bandwidth else (False,)
    policies = remat_policy.POLICIES if is_offloaded[-1] else remat_policy.ON_DEVICE
    if not paths.rematerialize:
        policies = (remat_policy.NONE,)
    return [choices.Saving(policy, moments) for moments in is_offloaded for policy in policies]


def traced_steps(
    experiment: Params,
    paths: choices.ChoicePaths,
    batch: BatchSpecs,
    precisions: Sequence[str],
    topology: Topology,
) -> Iterator[TracedStep]:
    """Yields traces of the step with each precision and number of micro-batches."""
    platform = platform_of_kind(topology)
    for types in dict.fromkeys(precisions) or [""]:
        for micro_batches in _micro_batches(batch):
            chosen = choices.Candidate("", "", (), remat_policy.NONE, micro_batches, types)
            changed = chosen.params(experiment, paths)
            if _LOGITS in changed.task:
                # The model reads the letters of products. Chunks of logits lack the rows' letter.
                changed.task.set(**{_LOGITS: _ALL_POSITIONS})
            for path in paths.dropless:
                given, even = changed.get(path), BalancedDispatch.params()
                even.set(bound=given.bound, rows_exchange=given.exchange)
                changed.set_path(path, even)
            yield trace(make_trainer(changed), batch, micro_batches, types, platform)


def _micro_batches(batch: BatchSpecs) -> list[int]:
    """Returns the numbers of micro-batches to try, which divide the rows of a batch."""
    rows = [known_sizes(spec.shape)[0] for spec in batch.values()]
    return [m for m in _MICRO_BATCHES if all(size % m == 0 for size in rows)]


def _variants(
    experiment: Params,
    paths: choices.ChoicePaths,
    step: TracedStep,
    topology: Topology,
    batch: BatchSpecs,
) -> list[choices.Variant]:
    """Returns the changes to compile the best candidate with."""
    has_experts = any("E" in spec.layout for spec in step.weights)
    found = []
    if has_experts and paths.dispatch:
        used = {experiment.get(path).cls for path in paths.dispatch}
        found += [
            choices.Variant(dispatch=cls.__name__) for cls in choices.DISPATCHES if used != {cls}
        ]
    device = topology.compile_devices()[0]
    options = option_variants(device, experiment.sharding.compile_options)
    exchanges = options.pop(ALL_TO_ALLS, ())
    if has_experts and exchanges:
        found.append(choices.Variant(compile_options=exchanges))
    if has_experts:
        # Ragged exchanges in several streams are not safe; see the option's reason.
        options.pop(PARALLEL, ())
    found += [choices.Variant(compile_options=each) for each in options.values()]
    if paths.interleaved and _INTERLEAVED in _micro_batches(batch):
        # The parts hide each other's collectives only if these are asynchronous.
        found.append(choices.Variant(interleaved=_INTERLEAVED, compile_options=exchanges))
    return found


def _torus(topology: Topology) -> tuple[int, ...]:
    """Returns the interconnect's shape in devices: first slices, last the devices of a chip."""
    if topology.kind != "tpu":
        return ()
    sizes = (topology.slices, *topology.shape, topology.chip.partitions)
    return sizes[topology.slices == 1 : None if topology.chip.partitions > 1 else -1]
