"""Compiled programs kept on disk, with what the compiler said when it compiled them.

jax keeps the programs. Its compiler says nothing of one that it finds there, so that warnings of
the first run would be missing from the second: they are kept beside.
"""

from __future__ import annotations

import os
import pathlib

import jax

_LEAST_SECONDS = 1.0


def keep_in(directory: str | os.PathLike) -> None:
    """Has programs that take a second or more to compile kept in a directory, for later runs.

    Raises ValueError naming --compilation_cache if it cannot be made.
    """
    try:
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--compilation_cache={directory}: {error.strerror}") from None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)


def with_earlier_output(digest: str, output: str) -> str:
    """Returns what the compiler said of the program of that digest, now or when it was first made.

    digest: of the program and all that it was compiled for.
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
