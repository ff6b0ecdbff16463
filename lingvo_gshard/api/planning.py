"""plan: memory, communication and time of a program on machines that you need not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from lingvo_gshard.api.errors import names_arguments
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.planning import planner
from lingvo_gshard.planning.experiments import PlanOptions, plan_experiment
from lingvo_gshard.planning.machines import topologies
from lingvo_gshard.planning.plan.plan import Plan


@overload
def plan(
    experiment: Params,
    topology: str,
    *,
    mesh: str | None = None,
    strategy: str | None = None,
    device_order: str = "contiguous",
    partitioner: str = "gspmd",
    tokens: float | None = None,
    calibration: str | None = None,
) -> Plan: ...


@overload
def plan(
    function: Callable[..., Any],
    specs: Sequence[Any],
    topology: str,
    *,
    mesh: str | None = None,
    strategy: str = "replicated",
    layouts: Sequence[Any] | None = None,
    donate: Sequence[int] = (),
    overrides: Mapping[str, str] | None = None,
    partitioner: str = "gspmd",
) -> Plan: ...


@names_arguments
def plan(subject: Params | Callable[..., Any], *args: Any, **options: Any) -> Plan:
    """Plans an experiment's training step, or any TensorFlow function, on a topology.

    The program is compiled ahead of time and not run, so you need not have the machine.

    Args:
      experiment: Params of an experiment, as `experiment` returns them; or
      function: a TensorFlow function, with
      specs: nested structures of tf.TensorSpec, one for each argument of the function.
      topology: the machine, such as "v3:32x32", "gpu:h100:8x4" or "cpu:8".
      mesh: axes and sizes, such as "data=4,model=2". None: the experiment's mesh, else data=N over
        all N devices.
      strategy: name or table of a strategy. By default the experiment's, else "expert"; for a
        function "replicated".
      device_order: for an experiment, "contiguous" or "topology".
      tokens: for an experiment, the tokens to train on; the plan then says what they cost.
      calibration: for an experiment, the file of a calibration (docs/profiling.md).
      layouts: for a function, as in `partition`.
      donate: for a function, as in `partition`.
      overrides: for a function, as in `partition`.
      partitioner: "gspmd" or "shardy".

    Returns:
      Memory, communication, arithmetic and time of the program on one device.

    Raises:
      ValueError: the topology is unknown, the mesh does not fit it, or its compiler refuses the
        program.
    """
    if isinstance(subject, Params):
        return _plan_experiment(subject, *args, **options)
    return planner.plan(subject, *args, **options)


def _plan_experiment(experiment: Params, topology: str, **options: Any) -> Plan:
    return plan_experiment(experiment, topologies.get(topology), PlanOptions(**options))
