"""libtpu, the TPU compiler: its version, its options, and the TPU slices that it compiles for."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from packaging.requirements import Requirement

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.planning.machines.chips import Chip

# libtpu compiles without a TPU. The first two variables keep it from waiting for the metadata of a
# TPU machine, and from locking out other processes that compile ("Internal error when accessing
# libtpu multi-process lockfile"). The last two have no effect here but silence warnings.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v3-8",
}

# The version that was tested, that of the extra `plan`.
VERSION = "0.0.42.1"

MISSING = "libtpu is not installed"

# The command that installs libtpu for the Python that runs, from any folder.
INSTALL = shlex.join([sys.executable or "python3", "-m", "pip", "install", f"libtpu=={VERSION}"])

# The environment variable of compiler options, which libtpu reads here as on a TPU.
OPTIONS = "LIBTPU_INIT_ARGS"


def installed() -> str | None:
    """Returns the installed version of libtpu; None if there is none."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def options() -> str:
    """Returns the compiler options in the environment, as one string.

    For example, `--xla_tpu_enable_async_all_to_all=true` overlaps all-to-alls with computation.
    """
    return os.environ.get(OPTIONS, "").strip()


def check_version() -> None:
    """Checks that libtpu is installed in the version that the installed jax requires.

    Raises:
      UserError: if it is missing or has another version; names --topology.
    """
    version = installed()
    if version is None:
        raise UserError(f"`topology`: {MISSING}; install it with {INSTALL}")
    for text in importlib.metadata.requires("jax") or ():
        wanted = Requirement(text)
        if wanted.name == "libtpu" and not wanted.specifier.contains(version, prereleases=True):
            raise UserError(
                f"`topology`: libtpu {version} is installed, but jax "
                f"{importlib.metadata.version('jax')} requires libtpu{wanted.specifier}; "
                f"install it with {INSTALL}"
            )


def devices(chip: Chip, shape: Sequence[int], wraps: Sequence[bool], slices: int = 1) -> list[Any]:
    """Returns the devices of TPU slices, slice by slice, to compile programs for.

    Args:
      chip: the kind of TPU.
      shape: the slice's shape, in chips.
      wraps: for each dimension, whether it is a ring.
      slices: number of slices of this shape.

    Raises:
      UserError: if libtpu does not know such a slice; names --topology and libtpu's reason.
    """
    check_version()
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    from jax.errors import JaxRuntimeError
    from jax.experimental import topologies

    name = f"{chip.key}:{'x'.join(map(str, shape))}"
    options: dict[str, Any] = {"wrap": [*wraps, *(False,) * (3 - len(wraps))]}
    if chip.chip_configuration:
        options["chip_config_name"] = chip.chip_configuration
    if all(size == 1 for size in shape):
        options["chips_per_host_bounds"] = [1, 1, 1]
    if slices > 1:
        options["num_slices"] = slices
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except JaxRuntimeError as error:
        raise UserError(f"`topology={name}`: libtpu refuses: {error}") from error
