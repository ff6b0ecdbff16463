"""Flags that say where and how an experiment's steps run."""

from __future__ import annotations

from absl import flags

from lingvo_gshard.api.options import RuntimeOptions
from lingvo_gshard.runtime.cluster.member import ClusterOptions
from lingvo_gshard.tools.flags.options import define_option_flags, read_options


def define_runtime_flags(values: flags.FlagValues, in_cluster: bool = True) -> None:
    """Defines the flags of `RuntimeOptions`.

    Args:
      values: the command's flags.
      in_cluster: whether the command can run in several processes.
    """
    define_option_flags(values, RuntimeOptions())
    if in_cluster:
        define_option_flags(values, ClusterOptions())


def runtime_options(values: flags.FlagValues) -> RuntimeOptions:
    """Returns the options that the flags of `define_runtime_flags` give."""
    cluster = read_options(values, ClusterOptions) if "coordinator" in values else None
    return read_options(values, RuntimeOptions, cluster=cluster)
