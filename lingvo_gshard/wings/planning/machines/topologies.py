"""Topologies to plan for, by name: slices of TPU pods, hosts of GPUs, cores of a CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lingvo_gshard.core import UserError
from lingvo_gshard.core import names as nearest_names
from lingvo_gshard.wings.planning.machines import chips, cloud_names, compilers, cuda

_FORMS = (
    "expected such as v3:32x32, v4:4x4x8, v5p:8x8x8*4 (four slices), cpu:8 or gpu:h100:8x4 (hosts "
    f"x GPUs of one host), or a cloud's name such as {cloud_names.EXAMPLES}"
)
_SIZES = re.compile(r"[1-9][0-9]{0,17}(x[1-9][0-9]{0,17})*")
# The number of a cloud's name, such as v5p-8, 8xH100 and H100:8, and how many neighbors are tried.
_COUNT, _NEAR = re.compile(r"(?<=[-:])[0-9]{1,6}$|^[0-9]{1,6}(?= *x *[a-zA-Z])"), 64
# A larger number is a slip of the pen: the largest clusters that train one model have fewer.
_MOST_DEVICES = 2**17
_MOST_CPU_DEVICES = 4096
# Virtual CPU devices in place of others; as many take some gigabytes and minutes.
_MOST_VIRTUAL_DEVICES = 2**15


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips and how they are connected.

    Attributes:
      name: the name, such as "v3:32x32".
      shape: chips along each dimension of a TPU slice, (hosts, GPUs per host), or (CPU cores,).
      wraps: for each dimension of the shape, whether it is a ring.
      slices: number of TPU slices of this shape, which the data-center network joins.
    """

    name: str
    chip: chips.Chip
    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    slices: int = 1

    @property
    def kind(self) -> str:
        """The kind of the chip: "tpu", "gpu" or "cpu"."""
        return self.chip.kind

    @property
    def chips(self) -> int:
        """The number of chips of all slices, or of CPU cores."""
        return self.slices * math.prod(self.shape)

    @property
    def devices(self) -> int:
        """The number of devices that a program is compiled for, which are the chips' partitions."""
        return self.chips * self.chip.partitions

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        if self.kind == "gpu":
            return self.shape[0]
        if self.kind == "cpu":
            return 1
        return self.slices * math.ceil(math.prod(self.shape) / self.chip.host_chips)

    @property
    def compiler(self) -> str:
        """The compiler that is used: "tpu", "gpu", or "cpu" if the chip's own is not available."""
        return compilers.available(self.kind)

    @property
    def compiler_choice(self) -> str:
        """A sentence that says whose compiler is used and why."""
        return compilers.choice(self.chip)

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        """Options that the compiler needs where its devices are not there."""
        return cuda.OPTIONS if self.compiler == "gpu" else {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for plans, such as a substitute for the topology's compiler."""
        return compilers.notes(self.chip)

    def compile_devices(self) -> list[Any]:
        """Returns jax devices to compile programs for, in the order of the partitions.

        This is for processes that plan and do not train: compilers then look for no accelerator,
        and jax creates as many virtual CPU devices as the topology has.

        Raises:
          UserError: if a compiler does not know the topology or was found too late, or if this
            process has already started jax with fewer CPU devices; names `topology`.
        """
        if self.compiler == "tpu":
            return compilers.devices(self.chip, self.shape, self.wraps, self.slices)
        if self.compiler == "gpu":
            return cuda.devices(self.chip, *self.shape)
        return _cpu_devices(self)


def get(name: str) -> Topology:
    """Returns the topology of a name.

    Names are such as `v3:32x32`, `v5p:8x8x8*4` (four slices), `cpu:8` and `gpu:h100:8x4` (hosts x
    GPUs per host), or what clouds call such machines: `v5litepod-16`, `p5.48xlarge`, `8xH100`.

    Raises:
      UserError: if there is no such topology, or it is too large; names `topology`.
    """
    try:
        found = _named(name)
    except UserError:
        if near := " and ".join(_next_sizes(name)):
            raise UserError(f"`topology={name}`: there is no such size. Nearest: {near}") from None
        raise
    if found.devices > _MOST_DEVICES:
        raise UserError(
            f"`topology={name}` has {found.devices:,} devices; expected at most {_MOST_DEVICES:,}"
        )
    most = max(found.chip.host_chips, cloud_names.MOST_OF_HOST)
    if found.kind == "gpu" and found.shape[1] > most:
        raise UserError(
            f"`topology={name}`: {found.shape[1]} GPUs of one host were given; NVLink connects "
            f"{found.chip.host_chips} of {found.chip.name}. Expected such as {found.chip.example}"
        )
    return found


def _named(name: str) -> Topology:
    gpus = {key: chips.get(key).host_chips for key in _keys("gpu")}
    kind, _, rest = cloud_names.topology_name(name, gpus).partition(":")
    if kind in ("gpu", "cpu") and "*" in rest:
        raise UserError(
            f"`topology={name}`: only TPUs form slices; expected such as gpu:h100:8x4 (hosts x "
            "GPUs of one host) or cpu:8, without '*'"
        )
    if kind == "gpu":
        return _gpu(name, rest)
    if kind == "cpu":
        return _cpu(name, rest)
    tpus = _keys("tpu")
    if kind not in tpus:
        hint = nearest_names.nearest(kind, (*tpus, *gpus, "cpu", "gpu", *cloud_names.MACHINES))
        raise UserError(f"`topology={name}`: unknown kind of chip {kind!r}; {_FORMS}. {hint}")
    return _tpu(name, kind, rest)


def _next_sizes(name: str) -> Iterator[str]:
    """Yields the names next in size that exist, such as v5p-2 and v5p-8 for v5p-7."""
    count = int((_COUNT.search(name) or "0")[0])
    for counts in (range(count - 1, 0, -1)[:_NEAR], range(count + 1, count + _NEAR)):
        for other in (_COUNT.sub(str(each), name) for each in counts):
            with contextlib.suppress(UserError):
                _named(other)
                yield other
                break


def larger(topology: Topology, times: int) -> Topology | None:
    """Returns a machine with `times` as many of the same chips; None if there is none."""
    key, shape = topology.chip.key, topology.shape
    if topology.kind == "cpu":
        return get(f"cpu:{shape[0] * times}")
    if topology.kind == "gpu":
        hosts, gpus = shape
        most = topology.chip.host_chips
        wide = min(times, most // gpus) if hosts == 1 and most % gpus == 0 else 1
        return get(f"gpu:{key}:{hosts * times // wide}x{gpus * wide}")
    chips_of_slice = math.prod(shape) * times
    even = cloud_names.even_shape(chips_of_slice, topology.chip.torus_dimensions)
    with contextlib.suppress(UserError):
        return get(f"{key}:{'x'.join(map(str, even))}*{topology.slices}")
    return None


def _keys(kind: str) -> tuple[str, ...]:
    return tuple(chip.key for chip in chips.CHIPS.values() if chip.kind == kind)


def names() -> tuple[str, ...]:
    """Returns one topology name for each kind of chip; other sizes are named in the same way."""
    return tuple(chip.example for chip in chips.CHIPS.values())


def records() -> list[dict[str, Any]]:
    """Returns the topologies that `listing` shows, in units without prefix: bytes, FLOP/s, B/s."""
    return [
        {
            "topology": topology.name,
            "chip": topology.chip.name,
            "devices": topology.devices,
            "usable_bytes": topology.chip.usable_bytes,
            "peak_bf16": topology.chip.peak("bf16"),
            "link_bandwidth": topology.chip.link_bandwidth if topology.chip.links else None,
            "compiler": topology.compiler,
        }
        for topology in map(get, names())
    ]


def listing() -> str:
    """Returns a table of the topologies, as text."""
    rows = [("topology", "chip", "devices", "memory", "peak bf16", "link", "compiler")]
    for record in records():
        link = record["link_bandwidth"]
        rows.append(
            (
                record["topology"],
                record["chip"],
                f"{record['devices']:,}",
                f"{record['usable_bytes'] / 2**30:.2f} GiB",
                f"{record['peak_bf16'] / 1e12:.1f} TFLOP/s",
                "-" if link is None else f"{link / 1e9:.0f} GB/s",
                record["compiler"],
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(
        [
            *lines,
            "",
            "Memory (what a program may use) and peak are per device; links are per direction.",
            "Other sizes are named the same way: v3:4x4, v4:4x4x8, v5e:2x4, gpu:h100:1x8.",
            "Several TPU slices, joined by the data-center network: v5p:8x8x8*4.",
            f"Names of clouds work too: {cloud_names.EXAMPLES}, or a3-highgpu-8g*4 for four hosts.",
            *compilers.listing(),
        ]
    )


def _sizes(name: str, text: str, dimensions: int, example: str) -> tuple[int, ...]:
    """The sizes in a text such as "32x32". Raises ValueError for another number of dimensions."""
    if not _SIZES.fullmatch(text) or text.count("x") != dimensions - 1:
        expected = f"{dimensions} sizes" if dimensions > 1 else "one size"
        raise UserError(
            f"`topology={name}`: {text!r} is not a shape; expected {expected}, such as {example}"
        )
    return tuple(int(size) for size in text.split("x"))


def _tpu(name: str, key: str, text: str) -> Topology:
    """The slices of TPUs that a text such as "32x32" or "8x8x8*4" describes."""
    chip = chips.get(key)
    text, star, count = text.partition("*")
    slices = _slices(name, chip, count) if star else 1
    shape = _sizes(name, text, chip.torus_dimensions, chip.example)
    most = math.prod(chip.pod_shape)
    pod = "x".join(map(str, chip.pod_shape))
    if math.prod(shape) > most or (
        chip.torus_dimensions == 2
        and any(size > most for size, most in zip(shape, chip.pod_shape, strict=True))
    ):
        raise UserError(
            f"`topology={name}`: a pod of {chip.name} has {most:,} chips, {pod}; "
            "choose a smaller shape"
        )
    if max(shape) > 1 and (shape[0] % 2 or shape[1] % 2):
        raise UserError(
            f"`topology={name}`: a host has 2x2 chips, so the first two sizes must be even; "
            f"expected such as {chip.example}"
        )
    suffix = f"*{slices}" if slices > 1 else ""
    return Topology(f"{key}:{text}{suffix}", chip, shape, _wraps(chip, shape), slices)


def _slices(name: str, chip: chips.Chip, text: str) -> int:
    """The number of slices that the text after `*` states."""
    if not _SIZES.fullmatch(text) or "x" in text:
        raise UserError(
            f"`topology={name}`: {text!r} is not a number of slices; expected a positive number, "
            f"such as {chip.example}*4"
        )
    if int(text) > 1 and chip.network_bandwidth is None:
        known = [c.key for c in chips.CHIPS.values() if c.kind == "tpu" and c.network_bandwidth]
        raise UserError(
            f"`topology={name}`: the rate of the network between slices of {chip.name} is not "
            f"published; several slices can be planned of {', '.join(known)}"
        )
    return int(text)


def _wraps(chip: chips.Chip, shape: tuple[int, ...]) -> tuple[bool, ...]:
    """Returns for each dimension of a slice whether the dimension is a ring.

    In a torus of three dimensions, all dimensions are rings if the slice consists of cubes of 4x4x4
    chips: optical switches connect the faces of cubes (Jouppi et al., TPU v4, ISCA 2023, section 2,
    https://arxiv.org/abs/2304.01433; "How to Scale Your Model", part 2).

    In a torus of two dimensions, a dimension that spans the pod is a ring: cables connect the pod's
    edges (Kumar et al., Exploring the Limits of Concurrency in ML Training on Google TPUs, MLSys
    2021, section 2, https://arxiv.org/abs/2011.03641; for v5e and v6e "How to Scale Your Model",
    part 2).
    """
    if chip.torus_dimensions == 3:
        return (all(size % 4 == 0 for size in shape),) * 3
    return tuple(size == full for size, full in zip(shape, chip.pod_shape, strict=True))


def _gpu(name: str, rest: str) -> Topology:
    key, _, text = rest.partition(":")
    nearest_names.check(key, _keys("gpu"), f"`topology={name}`: unknown GPU {key!r}")
    shape = _sizes(name, text, 2, f"gpu:{key}:8x4")
    return Topology(f"gpu:{rest}", chips.get(key), shape, (False, False))


def _cpu(name: str, text: str) -> Topology:
    shape = _sizes(name, text, 1, "cpu:8")
    if shape[0] > _MOST_CPU_DEVICES:
        raise UserError(f"`topology={name}`: expected at most {_MOST_CPU_DEVICES} virtual devices")
    return Topology(f"cpu:{text}", chips.get("cpu"), shape, (False,))


def _cpu_devices(topology: Topology) -> list[Any]:
    """As many virtual CPU devices as a topology has."""
    import jax

    if topology.devices > _MOST_VIRTUAL_DEVICES:
        raise UserError(
            f"`topology={topology.name}` has {topology.devices:,} devices; without the compiler "
            f"for {topology.chip.name}, at most {_MOST_VIRTUAL_DEVICES:,} are planned"
        )
    with contextlib.suppress(RuntimeError):
        if jax.config.values["jax_num_cpu_devices"] < topology.devices:
            jax.config.update("jax_num_cpu_devices", topology.devices)
    devices = jax.devices("cpu")
    if len(devices) < topology.devices:
        raise UserError(
            f"`topology={topology.name}` needs {topology.devices} virtual CPU devices, but this "
            f"process has already started jax with {len(devices)}; plan in a new process, or set "
            f"jax.config.update('jax_num_cpu_devices', {topology.devices}) before jax is used"
        )
    return devices[: topology.devices]
