"""partition, a function over many devices; verify, proof that a step over many devices is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lingvo_gshard.core import SILENT, Params, Progress, UserError
from lingvo_gshard.wings.functions import partition as partition_lib
from lingvo_gshard.wings.verification.experiment import VerifyOptions, verify_experiment
from lingvo_gshard.wings.verification.findings import Verification
from lingvo_gshard.wings.verification.function import verify_function

partition = partition_lib.partition


_OF_FUNCTION = ("arguments", "layouts", "overrides")
_OF_EXPERIMENT = ("device_order", "seed", "shrink", "dropout", "max_devices", "progress")


def verify(
    subject: Params | Callable[..., Any],
    /,
    arguments: Sequence[Any] | None = None,
    *,
    mesh: str | None = None,
    strategy: str | None = None,
    device_order: str | None = None,
    partitioner: str | None = None,
    tolerance: float = 1e-9,
    seed: int | None = None,
    shrink: bool | None = None,
    dropout: bool | None = None,
    max_devices: int | None = None,
    kernels: str | None = None,
    layouts: Sequence[Any] | None = None,
    overrides: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Checks that a training step, or any function, computes over a mesh what one device computes.

    The computation runs twice in this process, over the mesh and on one device, in float64. Missing
    devices are replaced by virtual CPU devices. For an experiment, `verify` compares the results of
    all layers, the loss, the metrics, every gradient and the whole new state; with local updates
    also the outer step. For a function, it compares the results of layers and of the function.

        >>> found = gshard.verify(params, mesh="data=2", strategy="expert")
        >>> found.is_equal
        True

    Args:
      subject: Params of an experiment, as `experiment` returns them; or a TensorFlow function, as
        `partition` takes it.
      arguments: for a function: nested structures of arrays, one for each argument.
      mesh: axes and sizes, such as "data=4,model=2". None: the experiment's mesh.
      strategy: name or table of a strategy. By default the experiment's, else "expert"; for a
        function "replicated".
      device_order: for an experiment, "contiguous" or "topology". None: the experiment's.
      partitioner: "gspmd" or "shardy". None: the experiment's.
      tolerance: the largest difference that counts as equal, relative to the tensor's scale.
      seed: for an experiment, the seed of weights and random numbers; by default 1.
      shrink: for an experiment, whether to make large sizes small; by default it does.
      dropout: for an experiment, whether dropout stays on; by default it does.
      max_devices: for an experiment, the largest number of devices, by default 16. A larger mesh is
        made smaller.
      progress: for an experiment, is told each stage as it begins.
      layouts: for a function, as in `partition`.
      overrides: for a function, as in `partition`.
      kernels: "tpu" or "cuda": the kernels of this platform compute, step by step. By default none.

    Returns:
      What was compared, the first tensor that differs, and what could not be compared.

    Raises:
      UserError: the mesh is missing or unknown, or a hyperparameter or an argument is wrong.
    """
    return _verify(subject, {name: value for name, value in locals().items() if value is not None})


def _verify(subject: Any, given: dict[str, Any]) -> Verification:
    del given["subject"]
    is_experiment = isinstance(subject, Params)
    for name in _OF_FUNCTION if is_experiment else _OF_EXPERIMENT:
        if name in given:
            kind = "an experiment" if is_experiment else "a function"
            raise UserError(f"`{name}` does not apply to {kind}")
    if is_experiment:
        progress = given.pop("progress", SILENT)
        return verify_experiment(subject, VerifyOptions(**given), progress)
    for name in ("arguments", "mesh"):
        if name not in given:
            raise UserError(f"`{name}` is missing, which a function needs")
    return verify_function(subject, **given)
