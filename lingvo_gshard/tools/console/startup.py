"""How every command-line program starts: quietly, with flags that explain themselves."""

from __future__ import annotations

import os
import pathlib
import shlex
import sys
import tempfile
import textwrap
import traceback
import warnings
from collections.abc import Callable

from absl import app, flags, logging

import lingvo_gshard

_PACKAGE = pathlib.Path(lingvo_gshard.__file__).parent
_JAX_PLATFORMS_GIVEN = bool(os.environ.get("JAX_PLATFORMS"))
HELP = ("-h", "--h", "-help", "--help", "--helpshort", "--helpfull")


def quiet_tensorflow() -> None:
    """Imports TensorFlow without its start-up messages; they are shown if the import fails.

    Also keeps jax, which Orbax brings, on the CPU unless JAX_PLATFORMS says otherwise: two
    libraries cannot share a GPU's memory.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    logging.set_verbosity(logging.WARNING)
    # Of a large table of embeddings; the gradient of a softmax that is tied to it is dense anyhow.
    warnings.filterwarnings("ignore", message="Converting sparse IndexedSlices to a dense Tensor")
    if "tensorflow" in sys.modules:
        return
    sys.stderr.flush()
    screen = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            import tensorflow as tf

            tf.config.list_physical_devices()
        except BaseException:
            held.seek(0)
            os.write(screen, held.read())
            raise
        finally:
            os.dup2(screen, 2)
            os.close(screen)


def let_jax_choose_devices() -> None:
    """Takes back that `quiet_tensorflow` keeps jax on the CPU; what JAX_PLATFORMS said holds."""
    import jax

    if not _JAX_PLATFORMS_GIVEN:
        jax.config.update("jax_platforms", None)


def parse_flags(values: flags.FlagValues, argv: list[str], about: str) -> None:
    """Parses a program's own flags; prints `about` and all flags and exits 0 where help is asked.

    Raises ValueError, with the nearest valid name, for a flag or a value that does not fit.
    """
    if any(argument in HELP for argument in argv[1:]):
        print(_help_text(values, about))
        sys.exit(0)
    try:
        rest = values(argv)
    except flags.Error as error:
        raise ValueError(" ".join(str(error).split())) from None
    if rest[1:]:
        raise ValueError(f"{rest[1]!r} is no flag; this program takes flags only, see --help")


def run_program(name: str, main: Callable[[list[str]], int]) -> None:
    """Runs `main` under absl, guarded, and exits with what it returns."""
    app.run(guarded(name, main), flags_parser=_leave_to_main)


def guarded(name: str, main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Returns `main` with users' mistakes told in words, and 1 returned for them.

    These are ValueErrors raised by this package and errors of files. Anything else is a fault of
    the program and keeps its traceback.
    """

    def run(argv: list[str]) -> int:
        try:
            return main(argv)
        except (ValueError, OSError) as error:
            if not _is_users(error):
                raise
            print(f"{name}: error: {error}", file=sys.stderr)
            return 1

    return run


def command_line(name: str, module: str, argv: list[str]) -> str:
    """Returns the command that was typed, as a line for a shell."""
    typed_as_module = pathlib.Path(argv[0]).suffix == ".py"
    program = ["python", "-m", module] if typed_as_module else [name]
    return shlex.join(program + argv[1:])


def _leave_to_main(argv: list[str]) -> list[str]:
    flags.FLAGS(argv[:1])
    return argv


def _is_users(error: Exception) -> bool:
    if isinstance(error, OSError):
        return True
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return pathlib.Path(raised_in).is_relative_to(_PACKAGE)


def _help_text(values: flags.FlagValues, about: str) -> str:
    lines = [about.strip(), "", "Flags:"]
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
