"""Starts commands without waiting for imports: a process that has imported all of them, and forks.

Importing TensorFlow and jax takes four seconds. The zygote does it once, before either has started
a thread, and forks a child for each command. The child sets up its directory, environment, limits
and standard streams as a shell would, calls the command's entry point, and ends as any interpreter
does, but does not free its objects. Only imports and that end differ from a new process.

    python -m tests.hard_knocks.zygote FILE_DESCRIPTOR_OF_A_SOCKET

A request is one line of JSON: {"start": fields of launch.Launch} or {"wait": process id}. The
answer is one line: a process id, or an exit code, which is negative for a signal.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import logging
import os
import pathlib
import pkgutil
import socket
import sys
import threading
from collections.abc import Callable

from absl import app

import lingvo_gshard
from lingvo_gshard.core import lazy
from lingvo_gshard.tools.console import entry
from tests.hard_knocks.launch import Launch

# Found by commands as the experiment test.tiny.
_EXPERIMENTS = "tests.tools.train.tiny_train"

# Name, mode and error handler of sys.stdin, sys.stdout and sys.stderr, as the interpreter has them.
_STREAMS = (
    ("stdin", "r", "strict"),
    ("stdout", "w", "strict"),
    ("stderr", "w", "backslashreplace"),
)

# The exit code of an interpreter that cannot write what its streams still hold.
_UNWRITTEN = 120

# Environment variables that libraries set when they are imported.
_set_by_imports: dict[str, str] = {}


def serve(connection: socket.socket) -> None:
    """Answers requests until the connection ends. Returns only in a child, set up as a command."""
    connection.sendall(b"ready\n")
    for line in connection.makefile("rb"):
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if not answer:
                connection.close()
                _become(Launch(**request["start"]))
                return
        connection.sendall(b"%d\n" % answer)
    os._exit(0)


def _become(launch: Launch) -> None:
    """Turns this process into one that a shell has started."""
    launch.environment = {**_set_by_imports, **launch.environment}
    launch.enter()
    sys.argv = launch.arguments
    for number, (name, mode, errors) in enumerate(_STREAMS):
        is_open = launch.streams[number] is not None
        stream = open(number, mode, encoding="utf-8", errors=errors) if is_open else None
        if stream and name == "stderr":
            stream.reconfigure(line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _exit_code(entry_point: Callable[[], object]) -> int:
    """Calls an entry point. Returns the exit code, and prints what the interpreter would."""
    try:
        ended = entry_point()
    except SystemExit as error:
        ended = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    if ended is None or isinstance(ended, int):
        return ended or 0
    print(ended, file=sys.stderr)
    return 1


def _end(code: int) -> None:
    """Ends this process as an interpreter does, but lets the system free its objects.

    To free a million objects one by one would copy all memory that it shares with the zygote.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            code = _UNWRITTEN
    os._exit(code)


def _import_everything() -> None:
    """Imports all that commands import, also what they import when they first use it."""
    variables = dict(os.environ)
    # Keras imports pandas where it is installed, and its pyarrow starts a thread.
    sys.modules["pandas"] = None  # pyright: ignore[reportArgumentType]
    modules = pkgutil.walk_packages(lingvo_gshard.__path__, f"{lingvo_gshard.__name__}.")
    names = [module.name for module in modules if not module.name.endswith("__main__")]
    used_late = [value for value in vars(lazy).values() if isinstance(value, lazy.LazyModule)]
    for name in (*(module.__name__ for module in used_late), *names, _EXPERIMENTS, "tensorboard"):
        importlib.import_module(name)
    del sys.modules["pandas"]
    # Each command prepares for its first use of a library, such as by hiding what it says then,
    # and a library that is not imported yet has asked absl for nothing and logs nothing.
    lazy._used.clear()
    for module in used_late:
        vars(module).pop("_module", None)
    app._init_callbacks.clear()
    logging.getLogger().handlers.clear()
    # jax keeps libtpu from waiting for the metadata of a TPU by a variable.
    _set_by_imports.update(os.environ.items() - variables.items())
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, "a forked process would lack the other threads"
    gc.collect()
    gc.freeze()


def _entry_point(program: str) -> Callable[[], object]:
    """Returns what a program calls: a console script, or `python -m lingvo_gshard`."""
    is_module = pathlib.Path(program).suffix == ".py"
    return entry.run_module if is_module else entry.run_script


if __name__ == "__main__":
    _import_everything()
    serve(socket.socket(fileno=int(sys.argv[1])))
    _end(_exit_code(_entry_point(sys.argv[0])))
