"""What one chip can do, by its maker's published figures; every figure has its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lingvo_gshard.core.config import names
from lingvo_gshard.planning.machines import chip_figures

# How types, by their names in HLO and in NumPy, fall under those that peak rates are published for.
_RATES = {
    "bf16": ("bf16", "bfloat16", "f16", "float16"),
    "f32": ("f32", "float32", "f64", "float64"),
    "int8": ("s8", "int8", "u8", "uint8", "s4", "int4", "u4", "uint4"),
}


@dataclasses.dataclass(frozen=True)
class Price:
    """A list price of one chip for one hour, without discounts."""

    amount: float
    currency: str
    region: str
    date: str
    source: str


@dataclasses.dataclass(frozen=True, eq=False)
class Chip:
    """A chip's published figures; rates, memory and bandwidth are those of one partition.

    A partition is what XLA calls a device: a TPU core where the chip has two that are apart, a
    whole chip otherwise.

    key: as in a topology's name, such as "v3". kind: "tpu", "gpu" or "cpu".
    partitions: per chip.
    peak_flops: of the matrix unit, FLOP/s by type ("bf16", "f32", "int8", "fp8") at one pass.
    vector_flops: of elementwise operations, FLOP/s; None where nothing is published.
    memory_bytes: of the specification. usable_bytes: what a compiled program may use of it.
    memory_bandwidth: bytes/s.
    links: of one chip to others; link_bandwidth: bytes/s of one link in one direction.
    torus_dimensions: of the links; 0 where a switch joins the chips of a host.
    host_chips: chips of one host. pod_shape: the largest torus, in chips; () if there is none.
    network_bandwidth: bytes/s of one partition to other hosts, one direction; None: not published.
    watts: of one chip. price: of one chip and hour.
    sources: by the name of a field, where its figure is published.
    """

    key: str
    name: str
    kind: str
    partitions: int
    peak_flops: Mapping[str, float]
    vector_flops: float | None
    memory_bytes: int
    usable_bytes: int
    memory_bandwidth: float
    links: int
    link_bandwidth: float
    torus_dimensions: int
    host_chips: int
    pod_shape: tuple[int, ...]
    network_bandwidth: float | None
    watts: float | None
    price: Price | None
    sources: Mapping[str, str]

    def peak(self, dtype: str, passes: int = 1) -> float:
        """Returns FLOP/s of one partition's matrix products of a type, named as HLO or NumPy does.

        passes: how often a TPU's matrix unit runs for one product of float32 (1, 3 or 6); a GPU
        has float32 units for what TF32 is too coarse for, and a CPU always computes in float32.
        """
        rate = _rate(dtype)
        if self.kind == "gpu" and rate == "f32" and passes > 1 and self.vector_flops:
            return self.vector_flops
        # What the chip has no rate for is computed in bfloat16.
        peak = self.peak_flops.get(rate, self.peak_flops["bf16"])
        return peak / (passes if self.kind == "tpu" else 1)


def _rate(dtype: str) -> str:
    if dtype.startswith(("f8", "float8")):
        return "fp8"
    return next((rate for rate, types in _RATES.items() if dtype in types), "f32")


def get(key: str) -> Chip:
    """Returns a chip; ValueError naming --topology, with the nearest name, if it is unknown."""
    if key not in CHIPS:
        raise ValueError(f"--topology: unknown chip {key!r}. {names.nearest(key, CHIPS)}")
    return CHIPS[key]


def _chip(key: str, figures: Mapping[str, tuple]) -> Chip:
    values = {field: figure for field, (figure, _) in figures.items()}
    sources = {field: source for field, (_, source) in figures.items()}
    for field in ("memory_bytes", "usable_bytes"):
        values[field] = int(values[field])
    if values["price"] is not None:
        values["price"] = Price(**values["price"], source=sources["price"])
    return Chip(key=key, **values, sources=sources)


CHIPS: Mapping[str, Chip] = {
    key: _chip(key, figures) for key, figures in chip_figures.FIGURES.items()
}
