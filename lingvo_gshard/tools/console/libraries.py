"""Libraries on the command line: hides what they log, and says how to install one that is missing.

Warnings of this package, and of modules of the user, are shown as one line each, and once. Messages
of libraries are shown only if the command fails with a traceback. With TF_CPP_MIN_LOG_LEVEL=0 in
the environment everything is shown, as the libraries write it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import pathlib
import re
import resource
import shlex
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterator

from lingvo_gshard.core import UserError, lazy
from lingvo_gshard.runtime import devices, standard_error
from lingvo_gshard.tools.console.spelling import with_flags

# Control characters (ISO/IEC 6429: C0, DEL and C1), but for the tab and the line break.
_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    """Escapes a text's control characters, which could change a terminal's colors, for example.

    Line breaks and tabs stay. Other control characters are written as in Python: \\x1b for Escape.
    """
    return _COMMANDS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def warn(text: str) -> None:
    """Writes a line to standard error and flushes it.

    Options are spelled as flags, and nothing in the text commands the terminal.
    """
    print(harmless(with_flags(text)), file=sys.stderr, flush=True)


_log = logging.getLogger(__name__)

_PACKAGE = pathlib.Path(__file__).parents[2]
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})

# TensorFlow, jax and their compilers map 3.5 GiB on two cores before a model is built, and more on
# more cores. Where the limit is reached, they end with a segmentation fault.
_LEAST_ADDRESS_SPACE = 4 * 2**30

# A run opens shared libraries, streams and the files of a checkpoint. With fewer open files, a run
# waits forever for a checkpoint that cannot be opened.
_LEAST_OPEN_FILES = 64

# Packages that extras of this one install.
_SERVING = ("httptools", "prometheus_client", "starlette", "uvicorn")
_EXTRAS: dict[str, str] = {**dict.fromkeys(_SERVING, "serve"), "ray": "ray"}

# Distributions that are not named as the package that they install.
_DISTRIBUTIONS = {
    "absl": "absl-py",
    "gin": "gin-config",
    "google": "protobuf",
    "orbax": "orbax-checkpoint",
}


class Messages(logging.Handler):
    """Shows warnings of this package and of the user's modules; hides warnings of libraries."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Shows or hides one message."""
        kind = "Error" if record.levelno >= logging.ERROR else "Warning"
        self._show(kind, record.getMessage(), record.pathname)

    def show_warning(
        self, message: Warning | str, category: type, file: str, *_: object, **__: object
    ) -> None:
        """Shows or hides one of Python's warnings; takes the place of `warnings.showwarning`."""
        self._show("Warning", str(message), file)

    def _show(self, kind: str, text: str, file: str) -> None:
        place = pathlib.Path(file)
        if not place.is_relative_to(_PACKAGE) and any(map(place.is_relative_to, _LIBRARIES)):
            standard_error.hidden.append(f"{file}: {text}")
        elif text not in self._shown:
            self._shown.add(text)
            warn(f"{kind}: {text}")


def prepare() -> None:
    """Prepares for libraries, which are imported when they are first used.

    Also keeps jax on the CPU, since TensorFlow and jax cannot share a GPU's memory.
    """
    # TensorFlow warns that sparse embedding gradients become dense. Ours are dense anyway: the
    # softmax shares the table.
    warnings.filterwarnings("ignore", message="Converting sparse IndexedSlices to a dense Tensor")

    @contextlib.contextmanager
    def import_tensorflow() -> Iterator[None]:
        check_limits()
        with standard_error.hide():
            yield
            lazy.tf.config.list_physical_devices()

    @contextlib.contextmanager
    def import_jax() -> Iterator[None]:
        check_limits()
        yield
        devices.keep_jax_on_cpu()

    lazy.surround_import("tensorflow", import_tensorflow)
    lazy.surround_import("jax", import_jax)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if not standard_error.shows_everything():
        messages = Messages()
        logging.getLogger().addHandler(messages)
        warnings.showwarning = messages.show_warning


def check_limits() -> None:
    """Raises ValueError if `ulimit` leaves too little memory or too few open files to start."""
    _check_open_files()
    _check_address_space()


def _check_open_files() -> None:
    """Raises the limit of open files to what the system allows, if it is too small to start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard) or soft >= _LEAST_OPEN_FILES:
        return
    if hard < _LEAST_OPEN_FILES:
        raise UserError(
            f"open files are limited to {hard} (ulimit -n). TensorFlow, jax and checkpoints need "
            f"at least {_LEAST_OPEN_FILES}. Raise the limit with: ulimit -n 1024"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (_LEAST_OPEN_FILES, hard))


def _check_address_space() -> None:
    """Raises ValueError if `ulimit -v` leaves too little to start; warns of any other limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    given = f"virtual memory is limited to {limit / 2**30:.1f} GiB (ulimit -v)"
    if limit < _LEAST_ADDRESS_SPACE:
        raise UserError(
            f"{given}. TensorFlow and jax need at least {_LEAST_ADDRESS_SPACE / 2**30:.0f} GiB, "
            "most of which they never touch. Remove the limit with: ulimit -v unlimited"
        )
    _log.warning(
        f"{given}. If that is too little, TensorFlow ends with a segmentation fault; then remove "
        "the limit with: ulimit -v unlimited"
    )


def advice_for_missing(error: ModuleNotFoundError) -> str | None:
    """Returns which package is missing and how to install it; None if it is a module of ours."""
    module = (error.name or "").partition(".")[0]
    if not module or module == _PACKAGE.name:
        return None
    distribution = _DISTRIBUTIONS.get(module, module)
    extra = _EXTRAS.get(module)
    requirement = (
        f"{_PACKAGE.name}[{extra}]" if extra else requirements().get(normal_name(distribution))
    )
    if requirement is None:
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if "frozen" not in f.filename
        ]
        where = f", which {frames[-1].filename}:{frames[-1].lineno} imports" if frames else ""
        return f"there is no module {error.name!r}{where}"
    command = shlex.join(
        [sys.executable or "python3", "-m", "pip", "install", *_source(requirement, extra)]
    )
    return f"the package {distribution} is missing. To install it: {command}"


def normal_name(distribution: str) -> str:
    """Returns the spelling of a distribution's name that is used as a key."""
    return distribution.lower().replace("_", "-")


def requirements() -> dict[str, str]:
    """Returns this package's requirements by distribution. Requirements of extras are left out."""
    listed = re.search(r"install_requires=\[(.*?)\]", _setup_text(), re.DOTALL)
    stated = re.findall(r'"(.+?)"', listed[1]) if listed else None
    if stated is None:
        stated = importlib.metadata.requires(_PACKAGE.name) or []
    found = {}
    for requirement in stated:
        name = re.match(r"[\w.-]+", requirement)
        if name and "extra ==" not in requirement:
            found[normal_name(name[0])] = requirement
    return found


def _source(requirement: str, extra: str | None) -> list[str]:
    """Returns pip's arguments: a clone with all it needs, in tested versions, or one package."""
    root = _PACKAGE.parent
    if _setup_text():
        clone = f"{root}[{extra}]" if extra else str(root)
        return ["-c", str(root / "constraints.txt"), "-e", clone]
    return [requirement]


def _setup_text() -> str:
    setup = _PACKAGE.parent / "setup.py"
    return setup.read_text(encoding="utf-8") if setup.exists() else ""
