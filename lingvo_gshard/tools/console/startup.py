"""Starts a command: hides messages of libraries, parses flags, turns mistakes into one line."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shlex
import sys
import tempfile
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator

from absl import flags, logging

import lingvo_gshard
from lingvo_gshard.core import lazy
from lingvo_gshard.runtime import devices
from lingvo_gshard.tools.console.output import STANDARD_OUTPUT

_PACKAGE = pathlib.Path(lingvo_gshard.__file__).parent
HELP = frozenset(("-h", "--h", "-help", "--help", "--helpshort", "--helpfull"))
VERSION = frozenset(("--version", "-version"))


def prepare_libraries() -> None:
    """Prepares for libraries that are imported when they are first used: hides what they say then.

    Also keeps jax on the CPU, since TensorFlow and jax cannot share a GPU's memory.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.set_verbosity(logging.WARNING)
    # TensorFlow warns that sparse embedding gradients become dense. Ours are dense anyway: the
    # softmax shares the table.
    warnings.filterwarnings("ignore", message="Converting sparse IndexedSlices to a dense Tensor")
    lazy.surround_import("tensorflow", _quiet_tensorflow)
    lazy.surround_import("jax", _jax_on_cpu)


@contextlib.contextmanager
def _quiet_tensorflow() -> Iterator[None]:
    """Hides TensorFlow's start-up messages while the block imports it; shows them if it fails."""
    sys.stderr.flush()
    screen = os.dup(2)
    with tempfile.TemporaryFile() as messages:
        os.dup2(messages.fileno(), 2)
        try:
            yield
            lazy.tf.config.list_physical_devices()
        except BaseException:
            messages.seek(0)
            os.write(screen, messages.read())
            raise
        finally:
            os.dup2(screen, 2)
            os.close(screen)


@contextlib.contextmanager
def _jax_on_cpu() -> Iterator[None]:
    """Keeps jax on the CPU, after the block has imported it, until something asks for devices."""
    yield
    devices.keep_jax_on_cpu()


def parse_flags(values: flags.FlagValues, argv: list[str], about: str) -> None:
    """Parses a command's flags; for --help prints `about` with all flags and exits with 0.

    --json without a value stands for --json=-, standard output.

    Args:
      values: the command's flags, parsed in place.
      argv: the program's name and the arguments.
      about: the command's documentation.

    Raises:
      ValueError: a flag is unknown or has a wrong value; the message has the nearest valid name.
    """
    if HELP.intersection(argv[1:]):
        print(_help_text(values, about))
        sys.exit(0)
    if "json" in values and not values["json"].boolean:
        argv = [f"--json={STANDARD_OUTPUT}" if a == "--json" else a for a in argv]
    try:
        rest = values(argv)
    except flags.Error as error:
        raise ValueError(" ".join(str(error).split())) from None
    if rest[1:]:
        raise ValueError(f"{rest[1]!r} is not a flag; this command takes only flags, see --help")


def guarded(name: str, main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Returns `main` with users' mistakes printed as one line, for which it returns 1.

    Mistakes are ValueErrors raised by this package and errors of files. Any other exception is a
    bug and keeps its traceback.

    Args:
      name: the command's name, which starts the line.
      main: takes the program's name and the arguments; returns the exit code.
    """

    def run(argv: list[str]) -> int:
        try:
            return main(argv)
        except (ValueError, OSError) as error:
            if not _is_mistake(error):
                raise
            message = getattr(error, "on_command_line", str(error))
            print(f"{name}: error: {message}", file=sys.stderr)
            return 1

    return run


def command_line(name: str, argv: list[str]) -> str:
    """Returns the command as the user typed it, as one line for a shell.

    Args:
      name: the command's name, such as "gshard-train".
      argv: the program's name and the arguments.
    """
    typed_as_module = pathlib.Path(argv[0]).suffix == ".py"
    program = (
        ["python", "-m", "lingvo_gshard", name.partition("-")[2]] if typed_as_module else [name]
    )
    return shlex.join(program + argv[1:])


def _is_mistake(error: Exception) -> bool:
    """Returns whether an error is a user's mistake and not a bug."""
    if isinstance(error, OSError):
        return True
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return pathlib.Path(raised_in).is_relative_to(_PACKAGE)


def _help_text(values: flags.FlagValues, about: str) -> str:
    lines = [about.strip(), "", "Flags:", "  --help", "  --version"]
    for flag in (values[name] for name in values):
        default = "" if flag.default in (None, [], False) else f" (default: {flag.default})"
        form = f"--{flag.name}" if flag.boolean else f"--{flag.name}={flag.name.upper()}"
        lines.append(f"  {form}")
        lines += textwrap.wrap(
            " ".join(flag.help.split()) + default,
            width=90,
            initial_indent=" " * 6,
            subsequent_indent=" " * 6,
        )
    return "\n".join(lines)
