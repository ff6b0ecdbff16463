"""Starts the commands: each is a module of lingvo_gshard.tools with a function `main(argv) -> int`.

The launcher imports only the tool that runs. A tool imports TensorFlow and jax late, before their
first use. So --help, --list and mistakes in flags are answered at once.
"""

from __future__ import annotations

import ast
import errno
import importlib
import importlib.util
import os
import pathlib
import pkgutil
import sys
from collections.abc import Callable

from absl import flags

from lingvo_gshard import tools
from lingvo_gshard.api.closed_output import discard
from lingvo_gshard.core import EXIT_CODES, VERSION, names, signals
from lingvo_gshard.tools.console import libraries, startup
from lingvo_gshard.tools.console.libraries import warn
from lingvo_gshard.tools.console.process_start import open_closed_streams

_PREFIX = "gshard-"
_VERSION_FLAGS = frozenset(("--version", "-version"))
_CLOSED = "standard output is closed. Redirect it to a file, or to /dev/null"


def run_script() -> None:
    """Entry point of every console script: runs the tool that the script is named after."""
    command = pathlib.Path(sys.argv[0]).stem
    sys.exit(_run(command.removeprefix(_PREFIX), [command, *sys.argv[1:]]))


def run_module() -> None:
    """Entry point of `python -m lingvo_gshard`: runs the tool that the first argument names.

    Without a tool, or with --help, it lists the commands; with --version it prints the version.
    """
    program, *arguments = sys.argv
    tool = arguments[0] if arguments else "--help"
    if tool in _VERSION_FLAGS:
        sys.exit(_print("lingvo_gshard", f"lingvo_gshard {VERSION}"))
    elif tool in ("-h", "--help", "help"):
        sys.exit(_print("lingvo_gshard", _overview()))
    elif tool not in tool_names():
        sys.exit(
            f"lingvo_gshard: error: unknown command {tool!r}. {names.nearest(tool, tool_names())}"
        )
    else:
        sys.exit(_run(tool, [program, *arguments[1:]]))


def tool_names() -> tuple[str, ...]:
    """Returns the names of all tools, sorted: what has a function `main` in lingvo_gshard.tools."""
    modules = pkgutil.iter_modules(tools.__path__)
    return tuple(sorted(m.name for m in modules if not m.ispkg or _has_main(_parsed(m.name))))


def _run(tool: str, argv: list[str]) -> int:
    return run(
        _PREFIX + tool, argv, lambda: importlib.import_module(f"lingvo_gshard.tools.{tool}").main
    )


def run(command: str, argv: list[str], load: Callable[[], Callable[[list[str]], int]]) -> int:
    """Runs the main function that `load` imports, as commands are run. Returns the exit code."""
    open_closed_streams()
    if sys.stdout is None:
        return _fail(command, _CLOSED)
    if _VERSION_FLAGS.intersection(argv[1:]):
        return _print(command, f"{command} {VERSION}")
    if not os.environ.get("COLUMNS", "").strip("0"):
        # rich would print nothing where COLUMNS is 0.
        os.environ.pop("COLUMNS", None)
    # Experiments, tasks and layers of the user are found in the current directory.
    sys.path.append(os.getcwd())
    libraries.prepare()
    try:
        # Libraries may read absl's own flags. The tool has its own FlagValues.
        flags.FLAGS(argv[:1])
        return startup.guarded(command, load())(argv)
    except ModuleNotFoundError as error:
        advice = libraries.advice_for_missing(error)
        if advice is None:
            raise
        return _fail(command, advice)
    except Exception as error:
        return startup.show_bug(command, error)


def _print(command: str, text: str) -> int:
    """Prints a command's whole output and returns the exit code."""
    if sys.stdout is None:
        return _fail(command, _CLOSED)
    try:
        print(text, flush=True)
    except OSError as error:
        # Python would try again to write at exit.
        discard(sys.stdout)
        if error.errno == errno.EPIPE:
            return EXIT_CODES[signals.CLOSED_OUTPUT]
        return _fail(command, f"standard output cannot be written: {error.strerror}")
    return 0


def _fail(command: str, message: str) -> int:
    """Prints a mistake and returns the exit code for it."""
    warn(f"{command}: error: {message}")
    return 1


def _overview() -> str:
    """Returns the version and the first line of each tool's documentation, without importing it."""
    lines = [f"lingvo_gshard {VERSION}", "", "Commands:"]
    for tool in tool_names():
        purpose = (ast.get_docstring(_parsed(tool)) or "").partition("\n")[0]
        lines.append(f"  {_PREFIX + tool:<16}  {purpose}")
    return "\n".join([*lines, "", f"For help on a command: {_PREFIX}train --help"])


def _parsed(module: str) -> ast.Module:
    """Returns a module or package of lingvo_gshard.tools, parsed and not imported."""
    spec = importlib.util.find_spec(f"{tools.__name__}.{module}")
    source = pathlib.Path(spec.origin).read_text("utf-8") if spec and spec.origin else ""
    return ast.parse(source)


def _has_main(module: ast.Module) -> bool:
    return any(isinstance(one, ast.FunctionDef) and one.name == "main" for one in module.body)
