"""partition, a function over many devices; verify, proof that a step over many devices is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from lingvo_gshard.core import SILENT, Params, Progress
from lingvo_gshard.wings.functions import partition as partition_lib
from lingvo_gshard.wings.verification.experiment import VerifyOptions, verify_experiment
from lingvo_gshard.wings.verification.findings import Verification
from lingvo_gshard.wings.verification.function import verify_function

partition = partition_lib.partition


@overload
def verify(
    experiment: Params,
    /,
    *,
    mesh: str | None = None,
    strategy: str | None = None,
    device_order: str | None = None,
    partitioner: str | None = None,
    tolerance: float = 1e-9,
    seed: int = 1,
    shrink: bool = True,
    dropout: bool = True,
    max_devices: int = 16,
    kernels: str | None = None,
    progress: Progress = ...,
) -> Verification: ...


@overload
def verify(
    function: Callable[..., Any],
    /,
    arguments: Sequence[Any],
    *,
    mesh: str,
    strategy: str = "replicated",
    layouts: Sequence[Any] | None = None,
    overrides: Mapping[str, str] | None = None,
    partitioner: str = "gspmd",
    tolerance: float = 1e-9,
    kernels: str = "",
) -> Verification: ...


def verify(subject: Params | Callable[..., Any], /, *args: Any, **options: Any) -> Verification:
    """Checks that a training step, or any function, computes over a mesh what one device computes.

    The computation runs twice in this process, over the mesh and on one device, in float64. Missing
    devices are replaced by virtual CPU devices. For an experiment, `verify` compares the results of
    all layers, the loss, the metrics, every gradient and the whole new state; with local updates
    also the outer step. For a function, it compares the results of layers and of the function.

    Args:
      experiment: Params of an experiment, as `experiment` returns them; or
      function: a TensorFlow function, as `partition` takes it, with
      arguments: nested structures of arrays, one for each argument of the function.
      mesh: axes and sizes, such as "data=4,model=2". None: the experiment's mesh.
      strategy: name or table of a strategy. By default the experiment's, else "expert"; for a
        function "replicated".
      device_order: for an experiment, "contiguous" or "topology". None: the experiment's.
      partitioner: "gspmd" or "shardy". None: the experiment's.
      tolerance: the largest difference that counts as equal, relative to the tensor's scale.
      seed: for an experiment, the seed of weights and random numbers.
      shrink: for an experiment, whether to make large sizes small.
      dropout: for an experiment, whether dropout stays on.
      max_devices: for an experiment, the largest number of devices; a larger mesh is made smaller.
      progress: for an experiment, is told each stage as it begins.
      layouts: for a function, as in `partition`.
      overrides: for a function, as in `partition`.
      kernels: "tpu" or "cuda": the kernels of this platform compute, step by step. By default none.

    Returns:
      What was compared, the first tensor that differs, and what could not be compared.

    Raises:
      UserError: the mesh is missing or unknown, or a hyperparameter or an argument is wrong.
    """
    if not isinstance(subject, Params):
        return verify_function(subject, *args, **options)
    progress = options.pop("progress", SILENT)
    chosen = VerifyOptions(*args, **options)
    return verify_experiment(subject, chosen, progress)
