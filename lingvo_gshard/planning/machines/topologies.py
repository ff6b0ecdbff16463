"""Machines to plan for, by name: slices of TPU pods, hosts of GPUs, cores of a CPU."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from lingvo_gshard.core.config import names as nearest_names
from lingvo_gshard.planning.machines import chips, libtpu

_FORMS = "expected such as v3:32x32, v4:4x4x8, cpu:8 or gpu:h100:8x4 (hosts x GPUs of one host)"
_SIZES = re.compile(r"[1-9][0-9]*(x[1-9][0-9]*)*")
_MOST_CPU_DEVICES = 4096

# One name of each generation, of a size that can be had.
_EXAMPLES = {
    "v2": "v2:16x16",
    "v3": "v3:32x32",
    "v4": "v4:8x8x8",
    "v5e": "v5e:16x16",
    "v5p": "v5p:8x8x8",
    "v6e": "v6e:16x16",
    "tpu7x": "tpu7x:8x8x8",
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips and how they are joined.

    name: as given. shape: a TPU slice's in chips; (hosts, GPUs of one host); (cores,).
    wraps: whether each dimension of the shape is a ring.
    """

    name: str
    chip: chips.Chip
    shape: tuple[int, ...]
    wraps: tuple[bool, ...]

    @property
    def kind(self) -> str:
        """What the chip is: "tpu", "gpu" or "cpu"."""
        return self.chip.kind

    @property
    def chips(self) -> int:
        """The number of chips; of a CPU, of cores."""
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """The number of partitions that a program is compiled for."""
        return self.chips * self.chip.partitions

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        if self.kind == "gpu":
            return self.shape[0]
        return 1 if self.kind == "cpu" else math.ceil(self.chips / self.chip.host_chips)

    @property
    def compiler(self) -> str:
        """Whose program is planned: "tpu"; "cpu", where it stands in for the topology's own."""
        return "tpu" if self.kind == "tpu" and libtpu.installed() else "cpu"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan for it should say of itself."""
        if self.kind == "tpu" and self.compiler == "cpu":
            return (f"an estimate: the CPU's compiler stands in for the TPU's, {libtpu.MISSING}",)
        if self.kind == "tpu" and libtpu.options():
            return (f"compiled with {libtpu.OPTIONS}={libtpu.options()}",)
        if self.kind == "gpu":
            return ("an estimate: the CPU's compiler stands in for the GPU's",)
        if self.kind == "cpu":
            return (f"an estimate: a device is one {self.chip.name}, with its share of memory",)
        return ()

    def compile_devices(self) -> list[Any]:
        """Returns jax devices to compile a program for, in the order of their partitions.

        It is for a process that plans and does not train: libtpu is told that there is no TPU, and
        as many CPU devices are made as the topology has.

        Raises ValueError naming --topology if libtpu refuses, or if this process has already
        started jax with fewer CPU devices.
        """
        if self.compiler == "tpu":
            return libtpu.devices(self.chip.key, self.shape, self.wraps)
        return _cpu_devices(self)


def get(name: str) -> Topology:
    """Returns the topology of a name: `v3:32x32`, `cpu:8`, `gpu:h100:8x4` (hosts x GPUs).

    Raises ValueError naming --topology if there is none.
    """
    kind, _, rest = name.strip().lower().partition(":")
    if kind == "gpu":
        return _gpu(name, rest)
    if kind == "cpu":
        return _cpu(name, rest)
    if kind not in _EXAMPLES:
        hint = nearest_names.nearest(kind, (*_EXAMPLES, "cpu", "gpu"))
        raise ValueError(f"--topology={name}: unknown kind of chip {kind!r}; {_FORMS}. {hint}")
    return _tpu(name, kind, rest)


def names() -> tuple[str, ...]:
    """Returns one name for each kind of chip; other sizes are named in the same way."""
    gpus = tuple(f"gpu:{chip.key}:8x8" for chip in chips.CHIPS.values() if chip.kind == "gpu")
    return (*_EXAMPLES.values(), *gpus, "cpu:8")


def listing() -> str:
    """Returns a table of `names()`, as --list_topologies prints it."""
    rows = [("topology", "chip", "devices", "memory", "peak bf16", "link", "compiler")]
    for name in names():
        topology = get(name)
        chip = topology.chip
        rows.append(
            (
                name,
                chip.name,
                f"{topology.devices:,}",
                f"{chip.usable_bytes / 2**30:.2f} GiB",
                f"{chip.peak('bf16') / 1e12:.1f} TFLOP/s",
                f"{chip.link_bandwidth / 1e9:.0f} GB/s" if chip.links else "-",
                topology.compiler,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    version = libtpu.installed()
    return "\n".join(
        [
            *lines,
            "",
            "Memory and peak are those of one device, a link's rate that of one direction.",
            "Other sizes are named alike, in chips: v3:4x4, v4:4x4x8, v5e:2x4, gpu:h100:1x8.",
            f"TPUs are compiled for by libtpu {version}." if version else f"{libtpu.MISSING}.",
        ]
    )


def _sizes(name: str, text: str, dimensions: int, example: str) -> tuple[int, ...]:
    if not _SIZES.fullmatch(text) or text.count("x") != dimensions - 1:
        what = f"{dimensions} sizes such as {example}" if dimensions > 1 else f"one, as {example}"
        raise ValueError(f"--topology={name}: {text!r} is no shape of it; expected {what}")
    return tuple(int(size) for size in text.split("x"))


def _tpu(name: str, key: str, text: str) -> Topology:
    chip = chips.get(key)
    shape = _sizes(name, text, chip.torus_dimensions, _EXAMPLES[key])
    most = math.prod(chip.pod_shape)
    pod = "x".join(map(str, chip.pod_shape))
    if math.prod(shape) > most or (
        chip.torus_dimensions == 2
        and any(size > most for size, most in zip(shape, chip.pod_shape, strict=True))
    ):
        raise ValueError(
            f"--topology={name}: a pod of {chip.name} has {most:,} chips, {pod}; "
            "take a smaller shape"
        )
    if max(shape) > 1 and (shape[0] % 2 or shape[1] % 2):
        raise ValueError(
            f"--topology={name}: a host has 2x2 chips, which the first two sizes must be "
            f"multiples of; expected such as {_EXAMPLES[key]}"
        )
    return Topology(f"{key}:{text}", chip, shape, _wraps(chip, shape))


def _wraps(chip: chips.Chip, shape: tuple[int, ...]) -> tuple[bool, ...]:
    """Which dimensions of a slice are rings.

    Three-dimensional: all, in slices of whole cubes of 4x4x4 chips, whose faces optical switches
    join (Jouppi et al., TPU v4, ISCA 2023, section 2, https://arxiv.org/abs/2304.01433; "How to
    Scale Your Model", part 2). Two-dimensional: those that span the pod, since the links around
    it are cables between its edges (Kumar et al., Exploring the Limits of Concurrency in ML
    Training on Google TPUs, MLSys 2021, section 2, https://arxiv.org/abs/2011.03641; for v5e and
    v6e "How to Scale Your Model", part 2).
    """
    if chip.torus_dimensions == 3:
        return (all(size % 4 == 0 for size in shape),) * 3
    return tuple(size == full for size, full in zip(shape, chip.pod_shape, strict=True))


def _gpu(name: str, rest: str) -> Topology:
    key, _, text = rest.partition(":")
    gpus = [chip.key for chip in chips.CHIPS.values() if chip.kind == "gpu"]
    if key not in gpus:
        raise ValueError(
            f"--topology={name}: unknown GPU {key!r}. {nearest_names.nearest(key, gpus)}"
        )
    return Topology(name, chips.get(key), _sizes(name, text, 2, f"gpu:{key}:8x4"), (False, False))


def _cpu(name: str, text: str) -> Topology:
    shape = _sizes(name, text, 1, "cpu:8")
    if shape[0] > _MOST_CPU_DEVICES:
        raise ValueError(
            f"--topology={name}: at most {_MOST_CPU_DEVICES} virtual devices; take fewer"
        )
    return Topology(name, chips.get("cpu"), shape, (False,))


def _cpu_devices(topology: Topology) -> list[Any]:
    import jax

    try:
        if jax.config.jax_num_cpu_devices < topology.devices:
            jax.config.update("jax_num_cpu_devices", topology.devices)
    except RuntimeError:
        pass
    devices = jax.devices("cpu")
    if len(devices) < topology.devices:
        raise ValueError(
            f"--topology={topology.name} needs {topology.devices} virtual CPU devices, but this "
            f"process has already started jax with {len(devices)}; plan in a new process, or set "
            f"jax.config.update('jax_num_cpu_devices', {topology.devices}) before jax is used"
        )
    return devices[: topology.devices]
