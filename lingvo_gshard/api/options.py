"""Options of the public API. Each field is also a flag of the command lines, of the same name."""

from __future__ import annotations

import dataclasses
from typing import Any

from lingvo_gshard.runtime.cluster.place import ClusterOptions


@dataclasses.dataclass(frozen=True)
class RuntimeOptions:
    """Options that decide where and how an experiment's steps run.

    Attributes:
      runtime: "local" (one device), "spmd" (all devices of the mesh, through XLA's SPMD
        partitioner) or "tpu_strategy" (all cores of `tpu`, through TensorFlow's TPU build). None:
        "spmd" if a mesh or a coordinator is given, else "local".
      mesh: axes and sizes, such as "data=4,model=2". None: the experiment's `sharding.mesh`, else
        data=N for all N devices.
      strategy: name or table of a strategy. None: the experiment's `sharding.strategy`, else
        "expert".
      device_order: "contiguous", or "topology" for rings of a TPU's interconnect.
      partitioner: XLA's partitioner, "gspmd" or "shardy".
      tpu: the TPU of "tpu_strategy": "local" on a TPU VM, a Cloud TPU's name or its address.
      compilation_cache: directory of compiled programs. None: in the user's cache; "": no cache.
      max_replicated_mb: refuses to run if each device would hold more MiB replicated although the
        strategy splits them. None: no limit.
      cluster: the processes that run together; `ClusterOptions()` detects them. None: this process
        alone.
    """

    runtime: str | None = None
    mesh: str | None = None
    strategy: str | None = None
    device_order: str = "contiguous"
    partitioner: str = "gspmd"
    tpu: str | None = None
    compilation_cache: str | None = None
    max_replicated_mb: float | None = None
    cluster: ClusterOptions | None = None

    def given(self) -> dict[str, Any]:
        """Returns the options that differ from their defaults, those of the cluster included."""
        values = _differing(self)
        cluster = values.pop("cluster", None)
        return values | _differing(cluster) if cluster else values

    def override(self, **values: Any) -> RuntimeOptions:
        """Returns the options with those `values` that are not None."""
        given = {name: value for name, value in values.items() if value is not None}
        return dataclasses.replace(self, **given)


def _differing(options: Any) -> dict[str, Any]:
    return {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != field.default
    }
