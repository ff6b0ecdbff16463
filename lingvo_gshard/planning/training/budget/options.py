"""Options of a budget: money, time, machines, and assumptions about a training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.planning.machines import chips, topologies
from lingvo_gshard.planning.machines.chips import Chip
from lingvo_gshard.planning.machines.topologies import Topology
from lingvo_gshard.planning.training import failures, job
from lingvo_gshard.planning.training.budget import laws
from lingvo_gshard.planning.training.record import Assumption

# Llama 3 405B: 38 to 43% (Dubey et al. 2024, section 3.3.2).
DENSE_MFU = 0.405
# DeepSeek-V3: 37 billion active weights, 14.8 trillion tokens, 2.664 million hours of H800, whose
# peak in bfloat16 is that of H100 (DeepSeek-AI 2024, section 1).
SPARSE_MFU = 6 * 37e9 * 14.8e12 / (2.664e6 * 3600 * 989.5e12)
# A float32 weight, its gradient and two moments.
STATE_BYTES = 16.0
# The part of a device's memory that weights, gradients and moments may fill.
STATE_SHARE = 0.5
# The part of the state that a checkpoint has: no gradients.
SAVED_SHARE = 0.75
DAYS = 90.0


@dataclasses.dataclass(frozen=True)
class BudgetOptions:
    """Options of the search for the best training of a budget.

    Attributes:
      budget: money, in the currency of list prices.
      days: longest time of the training.
      tokens: most tokens to train on, such as those one has; None is without limit.
      law: name of the scaling law.
      dense_mfu: MFU of dense models.
      sparse_mfu: MFU of models with experts.
      state_bytes: bytes of training state for each weight.
      failures: as `failures.get`; None takes those of similar chips.
      checkpoint_rate: bytes per second that one host writes and reads.
      restart: seconds from a failure until training goes on, before the state is restored.
      price_factors: factors of list prices by the chip's key.
    """

    budget: float
    days: float = DAYS
    tokens: float | None = None
    law: str = "joint"
    dense_mfu: float = DENSE_MFU
    sparse_mfu: float = SPARSE_MFU
    state_bytes: float = STATE_BYTES
    failures: str | None = None
    checkpoint_rate: float = job.HOST_RATE
    restart: float = job.RESTART
    price_factors: Mapping[str, float] = dataclasses.field(default_factory=dict)


def check(options: BudgetOptions) -> None:
    """Raises ValueError naming the flag of an option that is not in its range."""
    laws.get(options.law)
    if options.failures is not None:
        failures.get(options.failures)
    for flag, value, example in (
        ("budget", options.budget, "1e6 USD"),
        ("days", options.days, "90"),
        ("tokens", options.tokens, "1e12"),
        ("state_bytes", options.state_bytes, "16 bytes for each weight"),
        ("checkpoint_rate", options.checkpoint_rate, "1e9 bytes per second"),
    ):
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"`{flag}={value:g}`: expected more than 0, such as {example}")
    for value in (options.dense_mfu, options.sparse_mfu):
        if not 0 < value <= 1:
            raise UserError(f"`mfu={value:g}`: expected more than 0 and at most 1, such as 0.4")
    if not 0 <= options.restart < math.inf:
        raise UserError(f"`restart={options.restart:g}`: expected seconds, 0 or more")


def assumptions(options: BudgetOptions) -> list[Assumption]:
    """Returns what the search assumes, each with its flag and source."""
    defaults = BudgetOptions(options.budget)

    def row(name: str, field: str, unit: str, flag: str, source: str) -> Assumption:
        value = getattr(options, field)
        is_default = value == getattr(defaults, field)
        return Assumption(name, value, unit, flag, source if is_default else f"`{flag}`")

    return [
        row("MFU of dense models", "dense_mfu", "share", "mfu", "Llama 3 405B (Dubey et al. 2024, "
            "section 3.3.2, https://arxiv.org/abs/2407.21783)"),
        row("MFU with experts", "sparse_mfu", "share", "mfu", "DeepSeek-V3: its active weights, "
            "tokens and hours of GPUs, against the peak in bfloat16 though its products are fp8 "
            "(DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437)"),
        row("training state of a weight", "state_bytes", "bytes", "state_bytes", "float32 weight, "
            "gradient and two moments, sharded over all devices and filling at most half of them"),
        row("write and read rate", "checkpoint_rate", "bytes/s", "checkpoint_rate", "of each host"),
        row("restart", "restart", "seconds", "restart", "as for `goodput`"),
        row("longest training", "days", "days", "days", "assumed"),
    ]  # fmt: skip


# The largest cluster of GPUs that is tried.
_MOST_HOSTS = 4096
# Bytes per second between the GPUs of a host. Less is PCI Express, over which the rates of MFU that
# a budget assumes are out of reach.
_SLOWEST_LINK = 100e9


def priced_machines() -> list[Topology]:
    """Returns machines of every kind of accelerator with a list price and fast links."""
    found = []
    for chip in chips.CHIPS.values():
        is_fast = chip.kind == "tpu" or chip.link_bandwidth >= _SLOWEST_LINK
        if chip.price is not None and chip.kind != "cpu" and is_fast:
            found += [topologies.get(name) for name in _names(chip)]
    return found


def named_machines(text: str) -> list[Topology]:
    """Returns the machines of --topology: names, separated by commas.

    Raises:
      UserError: a name is no topology, or no price is published for its chip.
    """
    found = [topologies.get(name) for name in text.split(",")]
    for topology in found:
        if topology.chip.price is None:
            priced = [chip.key for chip in chips.CHIPS.values() if chip.price is not None]
            raise UserError(
                f"`topology={text}`: no price of {topology.chip.name} is published, so a budget "
                f"buys no time on it; expected one of {', '.join(priced)}"
            )
    return found


def _names(chip: Chip) -> list[str]:
    if chip.kind == "gpu":
        sizes = [2**power for power in range(int(math.log2(_MOST_HOSTS)) + 1)]
        return [f"gpu:{chip.key}:{hosts}x{chip.host_chips}" for hosts in sizes]
    found, shape = [], (2, 2, 1)[: len(chip.pod_shape)]
    while _is_within(shape, chip.pod_shape):
        found.append(f"{chip.key}:{'x'.join(map(str, shape))}")
        # The last of the smallest dimensions doubles, so that slices stay near cubes.
        smallest = max(range(len(shape)), key=lambda index: (-shape[index], index))
        shape = tuple(size * (1 + (index == smallest)) for index, size in enumerate(shape))
    return found


def _is_within(shape: Sequence[int], pod: Sequence[int]) -> bool:
    return all(size <= most for size, most in zip(sorted(shape), sorted(pod), strict=True))
