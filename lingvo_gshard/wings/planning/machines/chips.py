"""Chips with their published performance figures, each with its source."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

from lingvo_gshard.core import UserError, names, objects
from lingvo_gshard.wings.planning.machines.gpu_targets import ARCHITECTURES, GpuTarget

# Kinds of chips, and of the compilers for them -> jax's names of their platforms.
PLATFORMS = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}
# Types that peak rates are published for -> the names of types, in HLO and NumPy, that reach them.
FP8, FP4 = "fp8", "fp4"
_RATES = {
    "bf16": ("bf16", "bfloat16", "f16", "float16"),
    "f32": ("f32", "float32", "f64", "float64"),
    "int8": ("s8", "int8", "u8", "uint8", "s4", "int4", "u4", "uint4"),
}

# The environment variable with the share of a GPU's memory that jax takes.
_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@dataclasses.dataclass(frozen=True)
class Price:
    """The list price of one chip for one hour, without discounts.

    Attributes:
      currency: ISO code, such as "USD".
      date: year and month of the price, such as "2022-08".
    """

    amount: float
    currency: str
    region: str
    date: str
    source: str


@dataclasses.dataclass(frozen=True, eq=False)
class Chip:
    """The published figures of a chip.

    XLA compiles for partitions, which it calls devices. A TPU chip with two separate cores has two
    partitions; every other chip is one. Memory and rates are given for one partition.

    Attributes:
      key: the chip's name within a topology's name, such as "v3".
      kind: "tpu", "gpu" or "cpu".
      device_kinds: parts of jax's name of such a device, in lower case.
      peak_flops: peak FLOP/s of the matrix unit by type ("bf16", "f32", "int8", "fp8", "fp4"), in
        one pass.
      vector_flops: peak FLOP/s of elementwise operations; None if it is not published.
      memory_bytes: memory of one partition, as specified.
      usable_bytes: the part of the memory that a compiled program may use.
      memory_bandwidth: bytes per second.
      links: number of links of one chip to other chips.
      link_bandwidth: bytes per second of one link in one direction.
      torus_dimensions: dimensions of the torus that the links form; 0 if a switch connects the
        chips of a host.
      pod_shape: shape of the largest torus, in chips; () if there is no torus.
      network_bandwidth: bytes per second from one partition to other hosts in one direction;
        None if it is not published.
      host_bandwidth: bytes per second between the memories of one partition and its host in one
        direction; None if it is not published.
      watts, price: of one chip; None if they are not published.
      matrix_unit: rows and columns of a TPU's matrix unit; 0 for other chips. A product with a
        smaller dimension fills a part of it.
      product_efficiency: share of the peak that a product of two n x n matrices reaches, by n.
      fp8_efficiency: the same in FP8, for large products; None for that in bfloat16.
      measured_links: the chip whose measured collectives stand for this chip's collectives: "v3",
        "v5p", "a100", "h100", "b200" or "gb200" (wings/planning/machines/efficiencies.py). Empty if
        the estimate is the bound.
      failures: name of the failure rate of similar chips (wings/planning/training/goodput.py).
      target: how XLA's compiler for GPUs sees the chip; None for other chips.
      chip_configuration: libtpu's name for combining a chip's two cores to one device, where that
        is not its default; empty for other chips.
      sources: where each figure is published, by the name of its field.
    """

    key: str
    name: str
    kind: str
    device_kinds: tuple[str, ...]
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
    host_bandwidth: float | None
    watts: float | None
    price: Price | None
    example: str
    matrix_unit: int
    product_efficiency: Mapping[float, float]
    fp8_efficiency: float | None
    measured_links: str
    failures: str
    target: GpuTarget | None
    chip_configuration: str
    sources: Mapping[str, str]

    @property
    def capacity_reason(self) -> str:
        """A phrase that says how much of the memory a program may use, and why."""
        usable, memory = (size / 2**30 for size in (self.usable_bytes, self.memory_bytes))
        share = self.usable_bytes / self.memory_bytes
        return (
            f"a program may use {usable:.2f} of the {memory:.2f} GiB of a device ({share:.0%}): "
            f"{self.sources['usable_bytes']}"
        )

    def peak(self, dtype: str, passes: int = 1) -> float:
        """Returns the peak FLOP/s of one partition for matrix products.

        Args:
          dtype: type of the operands, by its name in HLO or NumPy.
          passes: passes of a TPU's matrix unit for one float32 product: 1, 3 or 6. A GPU computes
            products of more than one pass in its float32 units, a CPU computes all in float32.
        """
        rate = rate_of(dtype)
        if self.kind == "gpu" and rate == "f32" and passes > 1 and self.vector_flops:
            return self.vector_flops
        # Types without a rate of their own are computed in bfloat16.
        peak = self.peak_flops.get(rate, self.peak_flops["bf16"])
        return peak / (passes if self.kind == "tpu" else 1)


def rate_of(dtype: str) -> str:
    """Returns the type whose peak rate holds for products of a type of HLO or NumPy."""
    if dtype.startswith(("f8", "float8")):
        return FP8
    if dtype.startswith(("f4", "float4")):
        return FP4
    return next((rate for rate, types in _RATES.items() if dtype in types), "f32")


def get(key: str) -> Chip:
    """Returns the chip of a key, such as "v3".

    If XLA_PYTHON_CLIENT_MEM_FRACTION is set, it is the share of a GPU's memory that a program may
    use.

    Raises:
      UserError: if there is none; names `topology` and the nearest key. Or that variable is no
        share.
    """
    names.check(key, CHIPS, f"`topology`: unknown chip {key!r}")
    chip, share = CHIPS[key], os.environ.get(_SHARE)
    if chip.kind != "gpu" or share is None:
        return chip
    try:
        is_share = 0 < float(share) <= 1
    except ValueError:
        is_share = False
    if not is_share:
        raise UserError(f"{_SHARE}={share}: a share above 0 and up to 1 was expected")
    source = f"the share that jax takes with {_SHARE}={share}"
    return dataclasses.replace(
        chip,
        usable_bytes=int(chip.memory_bytes * float(share)),
        sources={**chip.sources, "usable_bytes": source},
    )


def of_device(platform: str, device_kind: str) -> Chip | None:
    """Returns the chip of a jax.Device, such as "TPU v5 lite"; None for CPUs and unknown chips."""
    found = [
        (len(part), chip)
        for chip in CHIPS.values()
        for part in chip.device_kinds
        # An L40 is no L4.
        if chip.kind == platform and re.search(rf"{part}(?!\d)", device_kind.lower())
    ]
    # "TPU v5 lite" contains "v5" as well.
    return max(found, key=lambda pair: pair[0], default=(0, None))[1]


def add(key: str, figures: Mapping[str, tuple]) -> Chip:
    """Adds a chip with figures as in `FIGURES`, so that it can be planned, and returns it.

    Raises:
      UserError: there is such a chip, or a field is missing or unknown.
    """
    if key in CHIPS:
        raise UserError(f"There is a chip {key!r}: {CHIPS[key].name}")
    fields = {field.name for field in dataclasses.fields(Chip)} - {"key", "sources"}
    for field in sorted(figures.keys() ^ fields):
        problem = "is missing" if field in fields else names.nearest(field, fields)
        raise UserError(f"Chip {key!r}: {field}: {problem}")
    CHIPS[key] = _chip(key, figures)
    return CHIPS[key]


def _chip(key: str, figures: Mapping[str, tuple]) -> Chip:
    values = {field: figure for field, (figure, _) in figures.items()}
    sources = {field: source for field, (_, source) in figures.items()}
    for field in ("memory_bytes", "usable_bytes"):
        values[field] = int(values[field])
    if values["price"] is not None:
        values["price"] = Price(**values["price"], source=sources["price"])
    return Chip(key=key, **values, sources=sources)


def _stated_figures() -> dict[str, dict[str, tuple]]:
    """Returns what chips.toml states: (figure, source) by the chip's key and the field's name."""
    stated = objects.table_beside(__file__, "chips.toml", dict[str, Any])
    tables = stated["templates"] | stated["chips"]
    found = {}
    for key in stated["chips"]:
        table = _with_inherited(key, tables)
        texts = stated["sources"]
        texts = texts | {"datasheet": texts[table["datasheet"]]}
        found[key] = {
            field: (_figure(field, table.get(field)), source.format_map(texts))
            for field, source in table["sources"].items()
        }
    return found


def _with_inherited(key: str, tables: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns a chip's fields and sources, the inherited ones included.

    A field with a source of its own but no figure is unknown.
    """
    table = tables[key]
    if "like" not in table:
        return table
    base = _with_inherited(table["like"], tables)
    sources = table.get("sources", {})
    kept = {field: figure for field, figure in base.items() if field not in sources}
    return {**kept, **table, "sources": base["sources"] | sources}


def _figure(field: str, stated: Any) -> Any:
    """Returns a figure of chips.toml in the type that `Chip` has for the field."""
    if isinstance(stated, list):
        return tuple(stated)
    if field == "product_efficiency":
        return {float(size): share for size, share in stated.items()}
    if field == "target" and stated is not None:
        return GpuTarget(**stated | {"architecture": ARCHITECTURES[stated["architecture"]]})
    return stated


FIGURES = _stated_figures()
CHIPS: dict[str, Chip] = {key: _chip(key, figures) for key, figures in FIGURES.items()}
