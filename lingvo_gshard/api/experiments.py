"""Experiments by name, with settings."""

from __future__ import annotations

import os
from collections.abc import Sequence

# Registers the experiments that come with the package.
from lingvo_gshard import params as _experiments  # noqa: F401
from lingvo_gshard.api.errors import names_arguments
from lingvo_gshard.core.config import gin_binding, registry
from lingvo_gshard.core.config.params import Params


@names_arguments
def experiment(
    name: str,
    settings: Sequence[str] = (),
    gin_files: Sequence[str | os.PathLike] = (),
) -> Params:
    """Returns the Params of an experiment, with settings applied.

    Args:
      name: a name of `experiments()`, such as "translation.quickstart".
      settings: gin statements, such as "trainer.steps = 100"; applied after the files.
      gin_files: paths of gin files.

    Raises:
      ValueError: a name, path or value is wrong. The message has the nearest valid name.
    """
    return apply_settings(registry.get(name), settings, gin_files)


def experiments() -> dict[str, str]:
    """Returns the purpose of each registered experiment, in one line, by name."""
    return {name: registry.describe(name).splitlines()[0] for name in registry.names()}


def apply_settings(
    params: Params, settings: Sequence[str], gin_files: Sequence[str | os.PathLike]
) -> Params:
    """Returns a copy of `params` with gin files and then single settings applied."""
    return gin_binding.apply_gin(params, [os.fspath(path) for path in gin_files], settings)
