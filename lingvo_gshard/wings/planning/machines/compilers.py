"""The compiler of XLA for a kind of chip, and what it means for a plan."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from packaging.requirements import Requirement

from lingvo_gshard.core import UserError, explained
from lingvo_gshard.wings.planning.machines import cuda
from lingvo_gshard.wings.planning.machines.chips import Chip

# libtpu compiles without a TPU. The first two variables keep it from waiting for the metadata of a
# TPU machine, and from locking out other processes that compile ("Internal error when accessing
# libtpu multi-process lockfile"). The last two have no effect here but silence warnings.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v3-8",
}

# The tested version of libtpu, which the extra `plan` of the package installs.
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
    """Raises UserError if libtpu is not installed in the version that jax requires."""
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

    Raises:
      UserError: if libtpu does not know such a slice; names `topology` and libtpu's reason.
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
    with explained(f"`topology={name}`: libtpu refuses", JaxRuntimeError):
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices


# Compilers -> the packages that hold them.
PACKAGES = {"tpu": "libtpu", "gpu": cuda.PACKAGES[-1]}


def available(kind: str) -> str:
    """Returns the compiler for a kind of chip: its own if it is installed, else "cpu"."""
    if kind == "tpu" and installed():
        return "tpu"
    if kind == "gpu" and cuda.installed():
        return "gpu"
    return "cpu"


def choice(chip: Chip) -> str:
    """Returns a sentence that says whose compiler is used for a chip and why."""
    if chip.kind == "cpu":
        return (
            "XLA's compiler for CPUs compiles the step. Its figures are an estimate: a device is "
            f"one {chip.name} and its share of the memory."
        )
    if available(chip.kind) == "cpu":
        missing, install = _missing(chip.kind)
        return (
            "XLA's compiler for CPUs compiles the step, as an estimate, because "
            f"{missing}. To install it: {install}"
        )
    if chip.kind == "tpu":
        return (
            f"libtpu {installed()} compiles the step: it is the compiler of {chip.name} and "
            "needs no TPU."
        )
    return (
        f"XLA's compiler for GPUs ({PACKAGES['gpu']} {cuda.installed()}) compiles the step for "
        f"{chip.name}. It needs no GPU."
    )


def notes(chip: Chip) -> tuple[str, ...]:
    """Returns notes for plans, such as a substitute for the chip's compiler."""
    if chip.kind == "cpu":
        return (f"an estimate: a device is one {chip.name} and its share of the memory",)
    if available(chip.kind) == "cpu":
        missing, install = _missing(chip.kind)
        chips = f"{chip.kind.upper()}s"
        return (
            f"an estimate: compiled for CPUs in place of {chips}, since {missing}; install it with "
            f"{install}",
        )
    if chip.kind == "tpu" and options():
        return (f"compiled with {OPTIONS}={options()}",)
    if chip.kind == "gpu":
        return (
            "compiled without autotuning, which needs a GPU: products are Triton's, in tiles of "
            "XLA's default size",
        )
    return ()


def waiting(chip: Chip) -> str:
    """Returns a sentence for users who wait for XLA's compiler for CPUs, a chip's substitute."""
    missing, install = _missing(chip.kind)
    return (
        f"still compiling, with XLA's compiler for CPUs, since {missing}; the compiler of "
        f"{chip.name} is faster and exact: {install}"
    )


def listing() -> list[str]:
    """Returns a line for each compiler: its version, or how to install it."""
    versions = {"tpu": installed(), "gpu": cuda.installed()}
    return [
        f"{PACKAGES[kind]} {version} compiles for {kind.upper()}s."
        if version
        else ": ".join(_missing(kind))
        for kind, version in versions.items()
    ]


def _missing(kind: str) -> tuple[str, str]:
    """Returns a phrase on the missing compiler, and the command that installs it."""
    return (MISSING, INSTALL) if kind == "tpu" else (cuda.MISSING, cuda.INSTALL)
