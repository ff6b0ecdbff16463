"""Flags that say where and how an experiment's steps run."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

import rich.console
from absl import flags

from lingvo_gshard.api.options import RuntimeOptions
from lingvo_gshard.core.files import cached
from lingvo_gshard.planning.compiling.cache import CompilationCache, Settings, using_settings
from lingvo_gshard.runtime.cluster.member import ClusterOptions
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.flags.options import define_option_flags, read_options

# The user's directory of the cache.
_NAME = "plans"


def define_compiling_flags(values: flags.FlagValues) -> None:
    """Defines the flags of `using_flags`."""
    flags.DEFINE_string(
        "compilation_cache",
        None,
        "Directory that keeps compiled programs for later plans; '' disables it. Default: "
        "lingvo_gshard/plans in $XDG_CACHE_HOME or ~/.cache.",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "generate_code",
        False,
        "Has libtpu generate the code of a device, too. Takes about ten times as long, and adds "
        "the bytes of the code to the peak.",
        flag_values=values,
    )


@contextlib.contextmanager
def using_flags(values: flags.FlagValues, console: rich.console.Console) -> Iterator[None]:
    """Has plans inside a `with` block compile as the flags say, and says what the cache did."""
    cache = None
    if values.compilation_cache != "":
        directory = cached.directory(_NAME, values.compilation_cache)
        cache = CompilationCache(pathlib.Path(directory))
    with using_settings(Settings(cache, values.generate_code)):
        yield
    if cache and (cache.read or cache.compiled):
        output.say(console, _counts(cache))


def _counts(cache: CompilationCache) -> str:
    damaged = f", {cache.damaged} of them because a file was damaged" if cache.damaged else ""
    return (
        f"Compilation cache {cache.directory}: {cache.read} read, {cache.compiled} "
        f"compiled{damaged}."
    )


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
