"""Registry of experiments: functions that return the Params of an experiment, by name.

An experiment outside the package is named by its module and its own name, such as
`my_package.my_module.my_experiment`. The module is imported when the name is first used.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Callable

from lingvo_gshard.core.config import names as names_lib
from lingvo_gshard.core.config import user_modules
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError

ExperimentFunction = Callable[[], Params]

_experiments: dict[str, ExperimentFunction] = {}


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
        if name in _experiments:
            raise UserError(f"Experiment {name!r} is already registered")
        if not inspect.getdoc(function):
            raise UserError(f"Experiment {name!r} needs a docstring that says what it is for")
        _experiments[name] = function
        return function

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
    return tuple(sorted(_experiments))


def describe(name: str) -> str:
    """Returns the docstring of an experiment.

    Raises:
      UserError: There is no such experiment. The message suggests the nearest name.
    """
    return inspect.getdoc(_function(name)) or ""


def _function(name: str) -> ExperimentFunction:
    if name not in _experiments:
        _import_module(name.rpartition(".")[0])
    if name not in _experiments:
        raise UserError(f"Unknown experiment {name!r}. {_hint(name)}")
    return _experiments[name]


def _hint(name: str) -> str:
    """Suggests the nearest experiment, or says where the module of an experiment is searched."""
    hint = names_lib.nearest(name, _experiments)
    package, dot, _ = name.partition(".")
    if "Did you mean" in hint or not dot or importlib.util.find_spec(package):
        return hint
    return (
        f"The module {package} is neither installed nor in the current directory nor on "
        f"PYTHONPATH. {hint}"
    )


def _import_module(name: str) -> None:
    """Imports a module, whose experiments are then registered; does nothing if there is none."""
    if name:
        with contextlib.suppress(ModuleNotFoundError):
            user_modules.import_module(name)
