"""Flags that say how plans are compiled, and where compiled programs are kept."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

import rich.console
from absl import flags

from lingvo_gshard.core import user_cache
from lingvo_gshard.planning.compiling.cache import CompilationCache, Settings, using_settings
from lingvo_gshard.tools.console import output

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
        directory = user_cache.directory(_NAME, values.compilation_cache)
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
