"""Starts a command: parses its flags, and turns mistakes into one line."""

from __future__ import annotations

import errno
import math
import pathlib
import re
import shlex
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable

from absl import flags

from lingvo_gshard.api.closed_output import discard
from lingvo_gshard.core import EXIT_CODES, VERSION, UserError, objects, registry, signals
from lingvo_gshard.runtime import standard_error
from lingvo_gshard.tools.console.libraries import warn
from lingvo_gshard.tools.console.output import STANDARD_OUTPUT
from lingvo_gshard.tools.console.spelling import spell_flags_of, with_flags
from lingvo_gshard.tools.flags import plain_flags
from lingvo_gshard.tools.flags.definitions import comma_list, define
from lingvo_gshard.wings.cluster.rendezvous import NotMetError
from lingvo_gshard.wings.cluster.worker_report import report_problem

_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_KINDS = {
    "int": "a whole number, such as 100",
    "float": "a number, such as 0.5 or 1e12",
    "bool": "true, false or no value",
}
_TOOLS = "lingvo_gshard.tools."
_HELP_PAGES = pathlib.Path(__file__).parents[1] / "help"
HELP = frozenset(("-h", "--h", "-help", "--help", "--helpshort", "--helpfull"))


def define_common_flags(values: flags.FlagValues) -> None:
    """Defines the flags that every command has."""
    define(
        values,
        **{
            "import": comma_list(
                "Modules of your own, such as my_router. A saved run may name classes of these "
                "and of lingvo_gshard, and of no others, since reading it runs them.",
                [],
            )
        },
    )


def parse_flags(
    values: flags.FlagValues, argv: list[str], about: str | None, command: str = ""
) -> flags.FlagValues:
    """Parses a command's flags and returns them.

    For --help it prints `about` with all flags and exits with 0.

    --json without a value stands for --json=-, standard output, and --params for all of them. Every
    command has --import, whose modules are imported here.

    Args:
      about: the command's documentation, or its first sentence if there is a page in tools/help.
      command: the name of the command's module, which names its page.

    Raises:
      UserError: a flag is unknown or has a wrong value; the message has the nearest valid name.
    """
    define_common_flags(values)
    spell_flags_of(values)
    if HELP.intersection(argv[1:]):
        print(_help_text(values, help_page(about, command)))
        sys.exit(0)
    if "json" in values and not values["json"].boolean:
        argv = [f"--json={STANDARD_OUTPUT}" if a == "--json" else a for a in argv]
    if "params" in values:
        argv = ["--params=" if a == "--params" else a for a in argv]
    if "gin_param" in values:
        argv = plain_flags.as_settings(argv)
    try:
        rest = values(argv)
    except flags.UnrecognizedFlagError as error:
        raise UserError(f"{error}{plain_flags.hint(error.flagname, values)}") from None
    except flags.Error as error:
        raise UserError(_flag_error(values, " ".join(str(error).split()))) from None
    for name, value in values.flag_values_dict().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"--{name}={value}; expected a finite number")
    for name in values["import"].value or ():
        _import(name)
    if rest[1:]:
        raise UserError(f"{rest[1]!r} is not a flag; this command takes only flags, see --help")
    return values


def help_page(about: str | None, command: str) -> str:
    """Returns a command's documentation: its first sentence and the page of its module, if any."""
    page = _HELP_PAGES / f"{command.removeprefix(_TOOLS)}.txt"
    has_page = command.startswith(_TOOLS) and page.exists()
    rest = objects.text_beside(str(page), page.name).rstrip() if has_page else ""
    return f"{(about or '').strip()}\n\n{rest}".strip()


def _import(name: str) -> None:
    """Imports a module of the user's; ValueError if there is none, or if it fails."""
    try:
        registry.import_module(name)
    except ModuleNotFoundError:
        raise UserError(
            f"--import={name}: there is no such module; it must be installed, in the current "
            "directory or on PYTHONPATH"
        ) from None


def _flag_error(values: flags.FlagValues, text: str) -> str:
    """Returns absl's message on a flag in words of the command line."""
    found = re.match(r"flag --(\w+)=(.*?): (.*)", text)
    if not found:
        return text
    name, given, reason = found.groups()
    if reason.startswith(("invalid literal", "could not convert", "('Non-boolean")):
        reason = f"expected {_KINDS[values[name].flag_type()]}"
    return f"--{name}={given}: {reason}"


def guarded(name: str, main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Wraps `main`: the result prints a user's mistake as one line and returns exit code 1.

    A request to stop and a reader of standard output that went away have their own exit codes.
    Mistakes are UserErrors and errors of files. Other exceptions are raised again; see `show_bug`.
    """

    def run(argv: list[str]) -> int:
        try:
            code = _exit_code(main, argv)
            sys.stdout.flush()
            return code
        except signals.StoppedError as stopped:
            warn(f"{name}: stopped by {stopped}")
            return EXIT_CODES[str(stopped)]
        except BrokenPipeError:
            # The reader of standard output is gone, such as head. Python would write at exit.
            discard(sys.stdout)
            return EXIT_CODES[signals.CLOSED_OUTPUT]
        except (UserError, OSError) as error:
            # To the agent of a cluster, if one has started this command.
            report_problem(_message_of(error), is_consequence=isinstance(error, NotMetError))
            warn(f"{name}: error: {_message_of(error)}")
            return 1

    return run


def show_bug(name: str, error: Exception) -> int:
    """Prints an exception that is no user's mistake, and whose it is. Returns the exit code."""
    # Earlier messages of libraries may explain it.
    for message in standard_error.hidden:
        print(message, file=sys.stderr)
    traceback.print_exc()
    place = registry.raised_in(error)
    warn(
        f"{name}: {place} raised this {type(error).__name__}. It is no module of lingvo_gshard"
        if place
        else f"{name}: this is a bug of lingvo_gshard {VERSION}, no mistake of yours. Please "
        "report it to the project, with the command and the lines above"
    )
    return 1


def command_line(name: str, argv: list[str]) -> str:
    """Returns the command as the user typed it, as one line for a shell."""
    typed_as_module = pathlib.Path(argv[0]).suffix == ".py"
    program = (
        ["python", "-m", "lingvo_gshard", name.partition("-")[2]] if typed_as_module else [name]
    )
    return shlex.join(program + argv[1:])


def _exit_code(main: Callable[[list[str]], int], argv: list[str]) -> int:
    try:
        return main(argv)
    except SystemExit as error:
        return int(error.code or 0)


def _message_of(error: Exception) -> str:
    """Returns an error as a sentence. One of writing without a file is of standard output."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if error.errno not in _WRITE_ERRORS:
        return error.strerror
    # Python would try again to write at exit.
    discard(sys.stdout)
    return f"standard output cannot be written: {error.strerror}"


# Help is wrapped to the terminal's width within these limits.
_LEAST_HELP, _MOST_HELP = 40, 80


# An entry of a list with its indented lines, or lines that are not indented.
_PARAGRAPH = re.compile(r"^- .*(?:\n(?:  .+|(?!- )\S.*))*|^\S.*(?:\n(?!- )\S.*)*", re.MULTILINE)
# An indented command, which may be continued over lines, and its words.
_COMMAND = re.compile(r"^( +)((?=.*\b(?:gshard-|curl )).*(?:(?<=\\)\n.*)*)", re.MULTILINE)
_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|[^\s'"])+""")


def refilled(text: str, width: int | None = None) -> str:
    """Returns a docstring with its paragraphs wrapped to a width, by default the terminal's.

    Commands are indented, and continued over lines if they are longer. Other indented lines stay as
    they are; a dash begins an entry of a list.
    """
    width = width or _help_width()

    def fill(paragraph: re.Match[str]) -> str:
        return textwrap.fill(
            " ".join(paragraph[0].split()),
            width,
            subsequent_indent="  " if paragraph[0].startswith("- ") else "",
            break_long_words=False,
            break_on_hyphens=False,
        )

    def folded(command: re.Match[str]) -> str:
        if max(map(len, command[0].splitlines())) <= width:
            return command[0]
        first, *words = _WORD.findall(command[2].replace("\\\n", " "))
        lines = [command[1] + first]
        for word in words:
            ending = "" if word is words[-1] else " \\"
            if len(f"{lines[-1]} {word}{ending}") > width:
                lines[-1] += " \\"
                lines.append(f"{command[1]}   ")
            lines[-1] += f" {word}"
        return "\n".join(lines)

    return _COMMAND.sub(folded, _PARAGRAPH.sub(fill, text))


def _help_width() -> int:
    width = shutil.get_terminal_size().columns
    return width if _LEAST_HELP <= width < _MOST_HELP else _MOST_HELP


# absl adds this to the help of a flag that may be repeated.
_REPEAT = re.compile(r"[.;\s]*;\s*repeat this option to specify a list of values$")


def _described(flag: flags.Flag) -> str:
    """Returns a flag's help as sentences."""
    text = " ".join(flag.help.split())
    if not _REPEAT.search(text):
        return text
    text = _REPEAT.sub("", text)
    return f"{text}." if "may be repeated" in text.lower() else f"{text}. May be repeated."


def _help_text(values: flags.FlagValues, about: str) -> str:
    width = _help_width()
    lines = [refilled(about, width), "", "Flags:", "  --help", "  --version"]
    for flag in (values[name] for name in values):
        default = "" if flag.default in (None, [], False) else f" (default: {flag.default})"
        form = f"--{flag.name}" if flag.boolean else f"--{flag.name}={flag.name.upper()}"
        lines.append(f"  {form}")
        lines += textwrap.wrap(
            with_flags(_described(flag)) + default,
            width=width,
            initial_indent=" " * 6,
            subsequent_indent=" " * 6,
            break_on_hyphens=False,
        )
    return "\n".join(lines)
