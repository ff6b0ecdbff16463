# tests: core/config/constraints.py, training/experiments.py, params/
"""Tests that no number in an experiment's tree ends in anything but a sentence."""

import importlib
import math
import pkgutil

import lingvo_gshard
from lingvo_gshard.api.experiments import experiment
from lingvo_gshard.core.config.params import Configurable
from lingvo_gshard.training.experiments import batch_specs, make_trainer

ROOMS = ("data", "preparation", "fine_tuning", "layers", "tasks", "training")
WRONG = (-1, 0, 10**12, 2**31 - 1, 1e9, math.nan, math.inf, "many", None)


def numbers(params):
    """Yields the paths of the numbers of a tree. The decoder repeats the encoder's names."""
    for path, value in params.leaves():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and not path.startswith("task.decoder."):
            yield path


def test_every_number_of_the_quickstart_works_or_is_refused_by_its_path():
    params = experiment("translation.quickstart")
    refused = accepted = 0
    for path in numbers(params):
        before = params.get(path)
        for value in WRONG:
            try:
                params.set_path(path, value)
                params.input.instantiate()
                batch_specs(params)
                make_trainer(params)
                accepted += 1
            except ValueError as error:
                refused += 1
                _, _, name = path.rpartition(".")
                # A contradiction between two numbers is found where both are known.
                assert str(error).startswith(("task", "input", "step", "run"))
                assert name in str(error)
            params.set_path(path, before)
    assert refused > accepted > 50


def configurables():
    """Returns all configurable classes of the package."""
    for module in pkgutil.walk_packages(lingvo_gshard.__path__, "lingvo_gshard."):
        if module.name.split(".")[1] in ROOMS:
            importlib.import_module(module.name)
    found, waiting = set(), [Configurable]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        found.add(cls)
    rooms = tuple(f"lingvo_gshard.{room}." for room in ROOMS)
    return [cls for cls in found if cls.__module__.startswith(rooms)]


def test_every_number_declares_a_range():
    undeclared = [
        f"{cls.__name__}.{name}"
        for cls in configurables()
        for name, value in cls.params().items()
        if type(value) in (int, float)
        if not cls.params().constraint(name).range()
    ]
    assert undeclared == []
