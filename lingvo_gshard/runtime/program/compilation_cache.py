"""A cache of compiled programs on disk, with the compiler's output.

jax caches the programs. Its compiler prints nothing for a cached program, so a second run would
lack the warnings of the first. The output is therefore stored next to the programs.
"""

from __future__ import annotations

import os
import pathlib

from lingvo_gshard.core.lazy import jax

_LEAST_SECONDS = 1.0


def keep_in(directory: str | os.PathLike) -> None:
    """Caches programs that take a second or more to compile in a directory.

    Raises:
      ValueError: names --compilation_cache if the directory cannot be created.
    """
    try:
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--compilation_cache={directory}: {error.strerror}") from None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)


def with_earlier_output(digest: str, output: str) -> str:
    """Returns the compiler's output for a program, from the cache if `output` is empty.

    Args:
      digest: digest of the program and its compilation options.
      output: the output of this compilation; stored in the cache unless empty.
    """
    if not jax.config.jax_compilation_cache_dir:
        return output
    file = pathlib.Path(jax.config.jax_compilation_cache_dir) / f"said-of-{digest}.txt"
    try:
        if output:
            unfinished = file.with_suffix(f".{os.getpid()}")
            unfinished.write_text(output, encoding="utf-8")
            os.replace(unfinished, file)
            return output
        return file.read_text(encoding="utf-8")
    except OSError:
        return output
