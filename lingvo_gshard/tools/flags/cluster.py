"""Flags for commands that run in several processes."""

from __future__ import annotations

from absl import flags

from lingvo_gshard.runtime.cluster.place import DEFAULT_TIMEOUT, ClusterOptions


def define_cluster_flags(values: flags.FlagValues) -> None:
    """Defines the flags that say which processes run a command together."""
    flags.DEFINE_string(
        "coordinator",
        None,
        "host:port of process 0, where the processes meet. Detected under Slurm, on Cloud TPU and "
        "on GKE.",
        flag_values=values,
    )
    flags.DEFINE_integer("num_processes", None, "Number of processes.", flag_values=values)
    flags.DEFINE_integer(
        "process_id",
        None,
        "Number of this process, from 0 to num_processes - 1.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "coordinator_timeout",
        DEFAULT_TIMEOUT,
        "Seconds to wait for the other processes.",
        1,
        flag_values=values,
    )
    flags.DEFINE_string(
        "coordinator_bind_address",
        None,
        "IP address at which process 0 listens; by default the coordinator's. 0.0.0.0 is all.",
        flag_values=values,
    )


def cluster_options(values: flags.FlagValues) -> ClusterOptions:
    """Returns the options that the flags give."""
    return ClusterOptions(
        coordinator=values.coordinator,
        num_processes=values.num_processes,
        process_id=values.process_id,
        coordinator_timeout=values.coordinator_timeout,
        coordinator_bind_address=values.coordinator_bind_address,
    )
