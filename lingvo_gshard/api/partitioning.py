"""partition, a function over many devices; verify, proof that a step over many devices is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lingvo_gshard.api.backend import check_choices
from lingvo_gshard.api.errors import names_arguments
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.runtime import partition as partition_lib
from lingvo_gshard.runtime.verification.experiment import VerifyOptions, verify_experiment
from lingvo_gshard.runtime.verification.report import Verification

partition = names_arguments(partition_lib.partition)


@names_arguments
def verify(
    experiment: Params,
    *,
    mesh: str | None = None,
    strategy: str | None = None,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Verification:
    """Checks that an experiment's training step over a mesh computes what it does on one device.

    Both run here, on virtual CPU devices, with sizes made small. The results of all layers, the
    loss, the metrics, every gradient and every new weight are compared.

    Args:
      experiment: Params of an experiment, as `experiment` returns them.
      mesh: axes and sizes, such as "data=4,model=2". None: the experiment's mesh.
      strategy: name or table of a strategy. None: the experiment's, else "expert".
      say: called with each stage.
      **options: the other fields of `VerifyOptions`.

    Returns:
      What was compared, and the first tensor that differs.

    Raises:
      ValueError: the mesh is missing or unknown, or a hyperparameter is wrong.
    """
    chosen = VerifyOptions(mesh=mesh, strategy=strategy, **options)
    check_choices(chosen.partitioner, chosen.device_order)
    return verify_experiment(experiment, chosen, say)
