"""Registry of experiments: functions that return the Params of an experiment, by name.

An experiment outside the package is named after its module and function, such as
`my_package.my_module.my_experiment`. The module is imported when the name is first used.

A module is a program. Files such as the params.txt of a run may name only classes of this package,
and of modules that the user has named in this process. A user who reads the run of a stranger must
not run the stranger's programs.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import pathlib
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable
from typing import Any

from lingvo_gshard.core.config import names as names_lib
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.seams import Seam


class Experiment(Configurable):
    """A task with an input, a training step and a run."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("name", "", "The experiment's registered name.")
        p.define("task", None, "Params of the task: the model with its loss.")
        p.define("input", None, "Params of the input.")
        p.define("step", None, "Params of the training step: all that determines its results.")
        p.define("run", None, "Params of the run.", changes_results=False)
        p.define("sharding", _sharding_params(), "How steps are partitioned and compiled.")
        return p


def _sharding_params() -> Params:
    p = Params()
    for name, default, help in (
        ("mesh", "", "Axes and sizes, such as 'data=4,model=2'. An option `mesh` overrides it."),
        ("strategy", "", "Name or table of a strategy. An option `strategy` overrides it."),
        (
            "overrides",
            {},
            "Strategies of single layers: path with wildcards -> table, such as 'H->model'.",
        ),
        (
            "device_order",
            "contiguous",
            "Order of the devices in the mesh. An option `device_order` overrides it.",
        ),
        ("partitioner", "gspmd", "XLA's partitioner. An option `partitioner` overrides it."),
        (
            "compile_options",
            (),
            "Options of XLA's compiler. Options `compile_options` replace them.",
        ),
    ):
        p.define(name, default, help, changes_results=False)
    return p


_PACKAGE = str(pathlib.Path(__file__).parents[2])
_PACKAGE_NAME = __name__.partition(".")[0]
_LIBRARIES = tuple(str(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))

# Top-level names of the modules that the user has named.
_named: set[str] = set()


def is_trusted(name: str) -> bool:
    """Returns whether a file may name classes of a module.

    A file may name modules of this package, modules of packages that the user has named, and
    modules that the user's program has imported. Python's own modules do not count as imported by
    the program, since every program imports them.
    """
    top = name.partition(".")[0]
    if top in (_PACKAGE_NAME, *_named):
        return True
    return top in sys.modules and top not in sys.stdlib_module_names


def import_module(name: str) -> types.ModuleType:
    """Returns a module that the user names, such as "my_package.my_module", and trusts it.

    Raises:
      ModuleNotFoundError: there is no such module.
      UserError: the module exists, but running it fails; names the file, the line and the error.
    """
    try:
        module = importlib.import_module(name)
        _named.add(name.partition(".")[0])
        return module
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            raise
        failure = error
    except (Exception, SystemExit) as error:
        failure = error
    raise UserError(
        f"the module {name} cannot be imported: {_place(failure)}: {_in_words(failure)}"
    ) from failure


def defined(name: str) -> Any:
    """Returns the class or function that a file names as its module and qualified name.

    A module also has names of what it imports, such as `shutil`; these belong to other modules.

    Args:
      name: such as "my_package.my_module.MyClass", of a module that `is_trusted`.

    Raises:
      UserError: there is no such module, or it defines nothing of this name. A module that the user
        has not named counts only if the program has imported it.
    """
    parts = name.split(".")
    may_import = parts[0] in (_PACKAGE_NAME, *_named)
    module = _longest_module(parts, may_import)
    if not module:
        raise UserError(
            f"{name!r} cannot be imported; the module {parts[0]} must be installed, in the current "
            "directory or on PYTHONPATH"
        )
    first, *rest = parts[module.count(".") + 1 :]
    found = vars(sys.modules[module]).get(first)
    for part in rest:
        found = getattr(found, part, None) if isinstance(found, type) else None
    own = f"{getattr(found, '__module__', None)}.{getattr(found, '__qualname__', None)}"
    if own != name:
        is_module_missing = rest and not may_import
        more = f"; modules not yet imported need `import={parts[0]}`" if is_module_missing else ""
        raise UserError(f"{name!r}: {module} defines no class or function of this name{more}")
    return found


def _longest_module(parts: list[str], may_import: bool) -> str:
    """Returns the longest beginning of a dotted name that is a module; "" if there is none."""
    found = ""
    for count in range(1, len(parts)):
        name = ".".join(parts[:count])
        try:
            _ = import_module(name) if may_import else sys.modules[name]
        except (ModuleNotFoundError, KeyError):
            break
        found = name
    return found


def raised_in(error: BaseException) -> str | None:
    """Returns the line of a user's module that raised an error, as "file:line".

    None if this package raised it, or a library that this package called.
    """
    frames = traceback.extract_tb(error.__traceback__)
    frames = [f for f in frames if not _is_of_a_library(f.filename)]
    if not frames or frames[-1].filename.startswith(_PACKAGE):
        return None
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def _is_of_a_library(file: str) -> bool:
    # The package itself may be installed among the libraries.
    return file.startswith(("<", *_LIBRARIES)) and not file.startswith(_PACKAGE)


def _place(error: BaseException) -> str:
    """Returns the last line of the user's files that an error passed, as "file:line"."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    # The first frame belongs to this file.
    frames = traceback.extract_tb(error.__traceback__)[1:]
    frames = [frame for frame in frames if not frame.filename.startswith("<")]
    own = [f for f in frames if not f.filename.startswith((_PACKAGE, *_LIBRARIES))] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "unknown line"


def _in_words(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it ends the program (exit code {error.code})"
    text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


ExperimentFunction = Callable[[], Params]

# Experiments by name. `lingvo_gshard.features` lists the modules of the package's own.
_EXPERIMENTS: Seam[ExperimentFunction] = Seam("experiments")


def register(name: str) -> Callable[[ExperimentFunction], ExperimentFunction]:
    """Registers the decorated function as an experiment.

    Its docstring states the purpose, the expected time and result, and the exact command.

    Args:
      name: Dotted name, such as "translation.quickstart".

    Raises:
      UserError: The name is taken or not made of identifiers, or the function has no docstring.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"{name!r} cannot name an experiment; expected identifiers and dots")

    def decorator(function: ExperimentFunction) -> ExperimentFunction:
        if not inspect.getdoc(function):
            raise UserError(f"Experiment {name!r} needs a docstring that says what it is for")
        try:
            return _EXPERIMENTS.register(name)(function)
        except ValueError:
            raise UserError(f"Experiment {name!r} is already registered") from None

    return decorator


def get(name: str) -> Params:
    """Returns new Params of an experiment.

    Raises:
      UserError: There is no such experiment. The message suggests the nearest name.
    """
    params = _function(name)()
    if "name" in params:
        params.name = name
    return params.locate()


def names() -> tuple[str, ...]:
    """Returns the names of all registered experiments, sorted."""
    return tuple(sorted(name for name, _ in _EXPERIMENTS.items()))


def describe(name: str) -> str:
    """Returns the docstring of an experiment.

    Raises:
      UserError: There is no such experiment. The message suggests the nearest name.
    """
    return inspect.getdoc(_function(name)) or ""


def _function(name: str) -> ExperimentFunction:
    if name in _EXPERIMENTS:
        return _EXPERIMENTS[name]
    module, _, last = name.rpartition(".")
    if module:
        with contextlib.suppress(ModuleNotFoundError):
            import_module(module)
    # A module may register its functions under shorter names.
    for registered, function in _EXPERIMENTS.items():
        is_named = registered == name or last in (registered, function.__name__)
        if is_named and (registered == name or function.__module__ == module):
            return function
    raise UserError(f"Unknown experiment {name!r}. {_hint(name)}")


def _hint(name: str) -> str:
    """Suggests the nearest experiment, or says where the module of an experiment is searched."""
    hint = names_lib.nearest(name, names())
    package, dot, _ = name.partition(".")
    if "Did you mean" in hint:
        return hint
    if not dot:
        return f"{hint}. One of your own is found by its module, such as my_module.{name}"
    if importlib.util.find_spec(package):
        return hint
    return (
        f"The module {package} is neither installed nor in the current directory nor on "
        f"PYTHONPATH. {hint}"
    )
