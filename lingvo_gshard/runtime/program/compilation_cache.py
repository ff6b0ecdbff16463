"""A cache of compiled programs on disk, with the compiler's output.

jax caches the programs. Its compiler prints nothing for a cached program, so a second run would
lack the warnings of the first. The output is therefore stored next to the programs.

On CPU, a program that jax found in its cache cannot be serialized again: what is loaded of it lacks
its functions, which shows when it is called (jax 0.10.2). Who serializes compiles `without_cache`.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
from collections.abc import Iterator

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import jax

_LEAST_SECONDS = 1.0
# jax's name of the event that it reads a program from its cache.
_HIT = "/jax/compilation_cache/cache_hits"

_lock = threading.Lock()
# Directories of jax's cache, one for each thread that compiles without it, the first one first.
_set_aside: list[str | None] = []


def keep_in(directory: str | os.PathLike) -> None:
    """Caches programs that take a second or more to compile in a directory.

    Raises:
      UserError: names --compilation_cache if the directory cannot be created.
    """
    try:
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"`compilation_cache={directory}`: {error.strerror}") from None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Has programs compiled again inside a `with` block, those of other threads, too."""
    with _lock:
        _set_aside.append(jax.config.values["jax_compilation_cache_dir"])
        if len(_set_aside) == 1:
            _use(None)
    try:
        yield
    finally:
        with _lock:
            directory = _set_aside[0]
            _set_aside.pop()
            if not _set_aside:
                _use(directory)


def _use(directory: str | None) -> None:
    if directory == jax.config.values["jax_compilation_cache_dir"]:
        return
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_compilation_cache_dir", directory)
    # jax decides once whether it uses a cache.
    compilation_cache.reset_cache()


@contextlib.contextmanager
def watching_cache() -> Iterator[list[str]]:
    """Lists the events inside a `with` block in which this thread found a program in the cache."""
    hits: list[str] = []
    thread = threading.get_ident()

    def on_event(event: str, **_: str | int) -> None:
        if event == _HIT and threading.get_ident() == thread:
            hits.append(event)

    jax.monitoring.register_event_listener(on_event)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(on_event)


def with_earlier_output(digest: str, output: str) -> str:
    """Returns the compiler's output for a program, from the cache if `output` is empty.

    Args:
      digest: digest of the program and its compilation options.
      output: the output of this compilation; stored in the cache unless empty.
    """
    if not jax.config.values["jax_compilation_cache_dir"]:
        return output
    file = pathlib.Path(jax.config.values["jax_compilation_cache_dir"]) / f"said-of-{digest}.txt"
    try:
        if output:
            unfinished = file.with_suffix(f".{os.getpid()}")
            unfinished.write_text(output, encoding="utf-8")
            os.replace(unfinished, file)
            return output
        return file.read_text(encoding="utf-8")
    except OSError:
        return output
