"""The compiler of XLA for a kind of chip, and what it means for a plan."""

from __future__ import annotations

from lingvo_gshard.planning.machines import cuda, libtpu
from lingvo_gshard.planning.machines.chips import Chip

# Compilers -> the packages that hold them.
PACKAGES = {"tpu": "libtpu", "gpu": cuda.PACKAGES[-1]}


def available(kind: str) -> str:
    """Returns the compiler for a kind of chip: its own if it is installed, else "cpu"."""
    if kind == "tpu" and libtpu.installed():
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
            f"libtpu {libtpu.installed()} compiles the step: it is the compiler of {chip.name} and "
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
    if chip.kind == "tpu" and libtpu.options():
        return (f"compiled with {libtpu.OPTIONS}={libtpu.options()}",)
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
    versions = {"tpu": libtpu.installed(), "gpu": cuda.installed()}
    lines = []
    for kind, version in versions.items():
        if version:
            lines.append(f"{PACKAGES[kind]} {version} compiles for {kind.upper()}s.")
        else:
            lines.append(": ".join(_missing(kind)))
    return lines


def _missing(kind: str) -> tuple[str, str]:
    """Returns a phrase on the missing compiler, and the command that installs it."""
    if kind == "tpu":
        return libtpu.MISSING, libtpu.INSTALL
    return cuda.MISSING, cuda.INSTALL
