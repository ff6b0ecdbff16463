"""libtpu, the compiler of TPUs: whether it can be used here, and the TPUs that it describes."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from typing import Any

from packaging.requirements import Requirement

# No TPU is asked for or looked for: libtpu must not wait for a TPU machine's metadata, nor hold
# a lock against other processes that compile, which would fail with "Internal error when
# accessing libtpu multi-process lockfile"; and it would warn if the last two
# were missing, which do not matter here.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v3-8",
}

# What a chip's cores are joined to one device by, where that is not the default.
_CHIP_CONFIGURATIONS = {"v4": "megacore"}

MISSING = "libtpu is not installed (pip install lingvo_gshard[plan])"

# The variable from which libtpu takes options of its compiler, here as on a TPU.
OPTIONS = "LIBTPU_INIT_ARGS"


def installed() -> str | None:
    """Returns the version of libtpu; None if it is not installed."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def options() -> str:
    """Returns the options that the compiler is given through the environment, as they stand there.

    `--xla_tpu_enable_async_all_to_all=true` has all-to-alls travel beside what needs them not.
    """
    return os.environ.get(OPTIONS, "").strip()


def check_version() -> None:
    """Raises ValueError if libtpu is missing or of a version that the installed jax is not for."""
    version = installed()
    if version is None:
        raise ValueError(f"--topology: {MISSING}")
    for text in importlib.metadata.requires("jax") or ():
        wanted = Requirement(text)
        if wanted.name == "libtpu" and not wanted.specifier.contains(version, prereleases=True):
            raise ValueError(
                f"--topology: libtpu {version} is installed, but jax "
                f"{importlib.metadata.version('jax')} wants libtpu{wanted.specifier}; "
                "pip install lingvo_gshard[plan] installs that"
            )


def devices(key: str, shape: Sequence[int], wraps: Sequence[bool]) -> list[Any]:
    """Returns the devices of a slice of TPU chips, which programs can be compiled for.

    key: of the generation, such as "v3". shape: in chips. wraps: whether each dimension is a ring.

    Raises ValueError naming --topology, with libtpu's reason, if it refuses.
    """
    check_version()
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    from jax.errors import JaxRuntimeError
    from jax.experimental import topologies

    name = f"{key}:{'x'.join(map(str, shape))}"
    options: dict[str, Any] = {"wrap": [*wraps, *(False,) * (3 - len(wraps))]}
    if key in _CHIP_CONFIGURATIONS:
        options["chip_config_name"] = _CHIP_CONFIGURATIONS[key]
    if all(size == 1 for size in shape):
        options["chips_per_host_bounds"] = [1, 1, 1]
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except JaxRuntimeError as error:
        raise ValueError(f"--topology={name}: libtpu refuses: {error}") from error
