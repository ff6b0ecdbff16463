"""Names that clouds give to machines, such as v5litepod-16 and a3-highgpu-8g, as topologies."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

from lingvo_gshard.core import objects

_STATED = objects.table_beside(__file__, "clouds.toml", dict[str, Any])
# Prefix of a name -> [key of the chip, counted per chip, dimensions of a slice].
_SLICES = _STATED["slices"]
# Name of a machine -> [key of the GPU, GPUs].
MACHINES = _STATED["machines"]
# Other names of GPUs -> keys of chips.
GPUS = _STATED["gpus"]
# Slices of three dimensions of at least this many chips consist of cubes of 4x4x4.
_CUBE = 4
# One name of each form, for messages.
EXAMPLES = "v5litepod-16, v4-32, a3-highgpu-8g, p5.48xlarge, ND96isr_H100_v5 and 8xH100"
_SLICE = re.compile(r"(?P<prefix>[a-z0-9]+)-(?P<count>[1-9]\d{0,5})(?P<slices>\*\d+)?")
_GPU = re.compile(
    r"((?P<count>[1-9]\d{0,5})\s*x\s*)?(?P<gpu>[a-z][a-z0-9-]*)(:(?P<many>[1-9]\d{0,5}))?"
)
# More GPUs than these are connected in racks only. In most hosts NVLink connects fewer.
MOST_OF_HOST = 16


def topology_name(name: str, gpus: Mapping[str, int]) -> str:
    """Returns the topology of a cloud's name, such as v5e:4x4 for v5litepod-16.

    A machine's name may say how many there are: a3-highgpu-8g*4. Every other name is returned in
    lower case.

    Args:
      gpus: the number of GPUs that NVLink connects, by the keys of the GPUs.
    """
    text = " ".join(name.lower().split())
    plain = re.sub(r"^(standard|nvidia)[_ -]", "", text)
    found = _slice(text) or _machine(plain.replace(" ", "_"), gpus) or _gpus(plain, gpus)
    if found:
        return found
    kind, colon, rest = text.partition(":")
    key, shape_colon, shape = rest.partition(":")
    is_gpu = kind == "gpu" and key in GPUS
    return f"{kind}{colon}{GPUS[key]}{shape_colon}{shape}" if is_gpu else text


def _slice(text: str) -> str:
    """Returns the slice of TPUs for a name such as v4-32; empty for other names."""
    found = _SLICE.fullmatch(text)
    if found is None or found["prefix"] not in _SLICES:
        return ""
    key, counted, dimensions = _SLICES[found["prefix"]]
    chips, rest = divmod(int(found["count"]), counted)
    if rest:
        return ""
    shape = "x".join(map(str, even_shape(chips, dimensions)))
    return f"{key}:{shape}{found['slices'] or ''}"


def even_shape(chips: int, dimensions: int) -> tuple[int, ...]:
    """Returns the most even shape of a slice, as Google lists it: 4x4x8, and 2x2x1 for one host."""
    unit = _CUBE if dimensions == 3 and chips % _CUBE**3 == 0 else 1
    count = chips // unit**dimensions
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    shapes = (
        (*sizes, count // math.prod(sizes))
        for sizes in itertools.combinations_with_replacement(divisors, dimensions - 1)
        if count % math.prod(sizes) == 0
    )
    ordered = [shape for shape in shapes if list(shape) == sorted(shape)]
    shape = tuple(size * unit for size in min(ordered, key=lambda shape: shape[-1] / shape[0]))
    # A host has 2x2 chips.
    return (*shape[1:], 1) if dimensions == 3 and shape[0] == 1 else shape


def _machine(text: str, gpus: Mapping[str, int]) -> str:
    """Returns the hosts for a name such as p5.48xlarge*2; empty for other names."""
    machine, star, hosts = text.partition("*")
    if machine not in MACHINES or (star and not hosts.isdecimal()):
        return ""
    key, count = MACHINES[machine]
    # The machines of a rack count as one host, as NVLink connects them.
    if gpus[key] > MOST_OF_HOST and int(hosts or 1) > 1:
        return _hosts(key, count * int(hosts), gpus)
    return f"gpu:{key}:{hosts or 1}x{count}"


def _gpus(text: str, gpus: Mapping[str, int]) -> str:
    """Returns the GPUs for a name such as 8xH100, H100:8 or H100; empty for other names."""
    found = _GPU.fullmatch(text)
    if found is None or (found["count"] and found["many"]):
        return ""
    key = GPUS.get(found["gpu"], found["gpu"])
    count = int(found["count"] or found["many"] or 1)
    return _hosts(key, count, gpus) if key in gpus else ""


def _hosts(key: str, count: int, gpus: Mapping[str, int]) -> str:
    """Returns as few hosts as have so many GPUs; empty if they cannot have equally many."""
    hosts = math.ceil(count / gpus[key])
    return "" if count % hosts else f"gpu:{key}:{hosts}x{count // hosts}"
