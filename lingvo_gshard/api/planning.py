"""plan, plan_generation: memory, communication and time on machines that you need not have."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

from lingvo_gshard.api.experiments import as_params
from lingvo_gshard.core import Params, UserError, registry
from lingvo_gshard.wings.planning import planner
from lingvo_gshard.wings.planning.experiments import PlanOptions, plan_experiment
from lingvo_gshard.wings.planning.generation import GenerationOptions, GenerationPlan
from lingvo_gshard.wings.planning.generation import plan_generation as plan_batch
from lingvo_gshard.wings.planning.largest_batch import LargestBatch, plan_largest_batch
from lingvo_gshard.wings.planning.loads.rating import LoadsOptions
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.plan.plan import Plan
from lingvo_gshard.wings.planning.programs import planned
from lingvo_gshard.wings.planning.programs.exported_function import check_specs, name_of

# The options of each kind of program.
_OF_PROGRAM = ("specs", "mesh", "weights", "moments", "step_tokens", "kernel_flops", "tokens")
_OF_FUNCTION = ("specs", "mesh", "strategy", "layouts", "donate", "overrides", "partitioner")
_OF_LOADS = ("loads", "loads_from", "replicas")
_OF_STEP = ("mesh", "strategy", "device_order", "partitioner", "tokens", "calibration")


def plan(
    subject: Params | str | os.PathLike | Callable[..., Any],
    /,
    specs: Sequence[Any] | str | None = None,
    topology: str | None = None,
    *,
    mesh: str | None = None,
    strategy: str | None = None,
    device_order: str | None = None,
    partitioner: str | None = None,
    tokens: float | None = None,
    calibration: str | None = None,
    loads: str | os.PathLike | None = None,
    loads_from: int | None = None,
    replicas: int | None = None,
    layouts: Sequence[Any] | None = None,
    donate: Sequence[int] | None = None,
    overrides: Mapping[str, str] | None = None,
    weights: str | None = None,
    moments: str | None = None,
    step_tokens: int | None = None,
    kernel_flops: Mapping[str, float] | None = None,
) -> Plan:
    """Plans an experiment's training step, any function, or a program in a file, on a topology.

    The program is compiled ahead of time and not run: plan(experiment, topology), plan(function,
    specs, topology) or plan(file, topology). A printed plan is a table of the main facts.

        >>> plan = gshard.plan(params, "cpu:8", mesh="data=8", strategy="expert")
        >>> print(plan)
        program   translation.quickstart
        machine   cpu:8: 8 devices, ...

    Args:
      subject: Params of an experiment; a function of TensorFlow or jax; or a file that
        `gshard-inspect --program` or `jax.export` wrote.
      specs: of a function, a nested structure of tf.TensorSpec or jax.ShapeDtypeStruct for each
        argument. Those of jax have shardings over a jax.sharding.AbstractMesh.
      topology: the machine, such as "v3:32x32", "v5p:8x8x8*4", "gpu:h100:8x4" or "cpu:8".
      mesh: axes and sizes. None: the experiment's, else data=N over all N devices.
      strategy: None: the experiment's, else "expert"; for a function "replicated".
      device_order: for an experiment, "contiguous" or "topology". None: the experiment's.
      partitioner: "gspmd" or "shardy". None: the experiment's.
      tokens: the tokens to train on; the plan then says what they cost.
      calibration: for an experiment, the file of a calibration (docs/profiling.md).
      loads: for an experiment, the file of loads that routers had (docs/planning.md).
      loads_from: the first step of this file to take; by default 0.
      replicas: further copies of experts in each layer that the placement has; by default 0.
      layouts, donate, overrides: for a TensorFlow function, as in `partition`.
      weights, moments: for a jax program, regular expressions for the names of such arguments.
      step_tokens: for a file or a jax function, the tokens of a batch.
      kernel_flops: for a file or a jax function, the FLOPs of one call on one device of kernels
        whose products are not in the program, by a regular expression for their names.

    Raises:
      UserError: an argument is wrong, or the topology's compiler refuses the program.
    """
    return _plan(subject, {name: value for name, value in locals().items() if value is not None})


def _plan(subject: Any, given: dict[str, Any]) -> Plan:
    is_function = not isinstance(given.pop("subject"), (Params, str, os.PathLike))
    if not is_function and "topology" not in given:
        given["topology"] = given.pop("specs", None)
    if isinstance(subject, Params):
        _check(given, "an experiment", (*_OF_STEP, *_OF_LOADS))
        asked = {name: given.pop(name) for name in _OF_LOADS if name in given}
        if "loads" in asked:
            asked["loads"] = os.fspath(asked["loads"])
        machine = _machine(given.pop("topology"))
        return plan_experiment(subject, machine, PlanOptions(loads=LoadsOptions(**asked), **given))
    if is_function:
        check_specs(subject, given.get("specs"))
    if is_function and not planned.is_jax_function(subject, given["specs"]):
        _check(given, "a function of TensorFlow", _OF_FUNCTION)
        return _plan_tensorflow(subject, **given)
    accepted = _OF_PROGRAM if is_function else _OF_PROGRAM[1:]
    _check(given, "a jax program or a file, which has its own shardings", accepted)
    machine, tokens = _machine(given.pop("topology")), given.pop("tokens", None)
    patterns = planned.MemoryPatterns(given.pop("weights", None), given.pop("moments", None))
    specs = given.pop("specs", None)
    facts = planned.ProgramFacts(patterns=patterns, **given)
    if isinstance(subject, (str, os.PathLike)):
        if subject in registry.names():
            as_params(str(subject))
        return planned.plan_file(subject, machine, facts, tokens)
    return planned.plan_function(subject, specs, machine, facts, tokens)


def _machine(name: str) -> topologies.Topology:
    """Returns a topology. Warns if XLA's compiler for CPUs, which may take minutes, is used."""
    machine = topologies.get(name)
    if machine.compiler != machine.kind:
        warnings.warn(machine.compiler_choice, stacklevel=4)
    return machine


def _check(given: Mapping[str, Any], kind: str, accepted: Sequence[str]) -> None:
    """Raises UserError for an option of `plan` that this kind of program does not have."""
    for name, value in given.items():
        if name not in (*accepted, "topology"):
            raise UserError(
                f"`{name}={value}` does not apply to {kind}; expected {', '.join(accepted)}"
            )
    if not isinstance(given.get("topology"), str):
        raise UserError("`topology` is missing: the machine, such as 'v3:32x32'")


_LARGEST = "largest"


@overload
def plan_generation(
    experiment: Params,
    /,
    topology: str,
    batch: int = 1,
    *,
    prompt: int = 0,
    every_layer: bool = False,
    mesh: str | None = None,
    strategy: str | None = None,
) -> GenerationPlan: ...


@overload
def plan_generation(
    experiment: Params,
    /,
    topology: str,
    batch: Literal["largest"],
    *,
    prompt: int = 0,
    every_layer: bool = False,
    mesh: str | None = None,
    strategy: str | None = None,
) -> LargestBatch: ...


def plan_generation(
    experiment: Params,
    /,
    topology: str,
    batch: int | str = 1,
    *,
    prompt: int = 0,
    every_layer: bool = False,
    mesh: str | None = None,
    strategy: str | None = None,
) -> GenerationPlan | LargestBatch:
    """Plans generation with an experiment's language model: a call of decoding, and prefill.

        >>> model = gshard.experiment("language_model.quickstart")
        >>> gshard.plan_generation(model, "cpu:1", batch=8).fits
        True

    Args:
      experiment: the experiment's Params. A text has as many positions as a row of its input.
      topology: the machine, such as "v5p:2x2x1".
      batch: texts that are decoded together, or "largest" to search the largest batch that fits.
      prompt: number of positions of an entering text's prompt; 0 takes half of the text's
        positions.
      every_layer: whether to compile all layers. Else deep models are extrapolated.
      mesh: axes and sizes. None: the experiment's mesh, else data=N over all N devices.
      strategy: name or table of a strategy. None: the experiment's, else "expert".

    Raises:
      UserError: the batch or the prompt does not fit, or `plan` would refuse the experiment.
    """
    if isinstance(batch, str) and batch != _LARGEST:
        raise UserError(f"`batch={batch}`: expected a number of texts, or {_LARGEST!r}")
    machine, options = _machine(topology), PlanOptions(mesh=mesh, strategy=strategy)
    asked = GenerationOptions(prompt=prompt, every_layer=every_layer)
    if isinstance(batch, str):
        return plan_largest_batch(experiment, machine, options, asked)
    return plan_batch(experiment, machine, options, dataclasses.replace(asked, batch=batch))


# jax says so of tensors of TensorFlow.
_NO_JAX_ARRAY = "as an abstract array"


def _plan_tensorflow(
    function: Callable[..., Any], /, specs: Sequence[Any], topology: str, **options: Any
) -> Plan:
    try:
        return planner.plan(function, specs, topology, **options)
    except TypeError as error:
        if _NO_JAX_ARRAY not in str(error):
            raise
        raise UserError(
            f"{name_of(function)} is a function of jax; give its arguments as jax.ShapeDtypeStruct "
            "with shardings over a jax.sharding.AbstractMesh"
        ) from error
