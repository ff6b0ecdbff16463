"""Flags that say where and how an experiment's steps run."""

from __future__ import annotations

from absl import flags

from lingvo_gshard.api.options import RuntimeOptions
from lingvo_gshard.sharding import strategies
from lingvo_gshard.tools.flags.cluster import cluster_options, define_cluster_flags
from lingvo_gshard.training.experiments import DEFAULT_STRATEGY


def define_runtime_flags(values: flags.FlagValues, in_cluster: bool = True) -> None:
    """Defines the flags of `RuntimeOptions`.

    Args:
      values: the command's flags.
      in_cluster: whether the command can run in several processes.
    """
    flags.DEFINE_string(
        "runtime",
        None,
        "Where steps run: local (one device), spmd (all devices of --mesh, through XLA's SPMD "
        "partitioner) or tpu_strategy (all cores of --tpu, through TensorFlow's TPU build). "
        "Default: spmd if --mesh, --coordinator or sharding.mesh is given, else local.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "tpu",
        None,
        "TPU of --runtime=tpu_strategy: local on a TPU VM, else the name of a Cloud TPU or "
        "grpc://address:port.",
        flag_values=values,
    )
    define_partitioning_flags(values)
    if in_cluster:
        define_cluster_flags(values)


def define_partitioning_flags(values: flags.FlagValues) -> None:
    """Defines the flags for partitioning and compiling a program."""
    define_splitting_flags(values)
    flags.DEFINE_string(
        "compilation_cache",
        None,
        "Directory that keeps compiled programs for later runs, and the weights that decoding "
        "reads; '' disables it. Default: lingvo_gshard in $XDG_CACHE_HOME or ~/.cache.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "max_replicated_mb",
        None,
        "Refuses to run if each device would hold more MiB of replicated tensors although the "
        "strategy splits them.",
        0.0,
        flag_values=values,
    )


def define_splitting_flags(values: flags.FlagValues) -> None:
    """Defines the flags for the mesh and the sharding strategy."""
    flags.DEFINE_string(
        "mesh",
        None,
        "Mesh axes with their sizes, such as data=4,model=2. Default: sharding.mesh, else data=N "
        "for all N devices. Missing CPU devices are created virtually.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "strategy",
        None,
        "Which dimensions are split over which axis: one of "
        f"{', '.join(strategies.base_names())}; several joined by '_'; or a table such as "
        f"'B,G->data; H->model'. Default: sharding.strategy, else {DEFAULT_STRATEGY}.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "device_order",
        "contiguous",
        "Order of the devices in the mesh: contiguous, or topology for rings of a TPU's "
        "interconnect.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "partitioner", "gspmd", "XLA's partitioner: gspmd or shardy.", flag_values=values
    )


def runtime_options(values: flags.FlagValues) -> RuntimeOptions:
    """Returns the options that the flags of `define_runtime_flags` give."""
    return RuntimeOptions(
        runtime=values.runtime,
        mesh=values.mesh,
        strategy=values.strategy,
        device_order=values.device_order,
        partitioner=values.partitioner,
        tpu=values.tpu,
        compilation_cache=values.compilation_cache,
        max_replicated_mb=values.max_replicated_mb,
        cluster=cluster_options(values) if "coordinator" in values else None,
    )
