"""Published rates of chips that interrupt a training, each with its source."""

from __future__ import annotations

import dataclasses
import math

from lingvo_gshard.core.config import names
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.planning.machines.topologies import Topology


@dataclasses.dataclass(frozen=True)
class FailureRate:
    """A rate of interruptions, as the mean time of one chip.

    Attributes:
      name: a short name, such as "llama3".
      chip_hours: mean chip-hours between two interruptions of a training.
      count: number of interruptions that were counted; None if it is not published. The fewer they
        are, the less certain is the rate.
      source: what was counted, and where it is published.
    """

    name: str
    chip_hours: float
    count: int | None
    source: str


RATES = {
    rate.name: rate
    for rate in (
        FailureRate(
            "llama3",
            54 * 24 * 16_384 / 419,
            419,
            "Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100 (Dubey et al. "
            "2024, section 3.3.4, https://arxiv.org/abs/2407.21783)",
        ),
        FailureRate(
            "rsc1",
            8 * 24 * 1000 / 6.5,
            None,
            "Meta's cluster RSC-1: 6.50 failures in 1,000 days of a node of 8 A100 (Kokolis et al. "
            "2025, https://arxiv.org/abs/2410.21680)",
        ),
        FailureRate(
            "opt",
            61 * 24 * 992 / (35 + 70),
            35 + 70,
            "OPT-175B: at least 35 manual and an estimated 70 automatic restarts in 2 months on "
            "992 A100 (Zhang et al. 2022, section 2.5, https://arxiv.org/abs/2205.01068)",
        ),
        FailureRate(
            "bloom",
            7 * 24 * 384 / 1.5,
            22,
            "BLOOM: one or two GPUs failed in a week, for 3.5 months on 384 A100 (Le Scao et al. "
            "2022, https://arxiv.org/abs/2211.05100)",
        ),
        FailureRate(
            "tpu_v4",
            4 * 24 / 0.0008,
            None,
            "TPU v4 pods: 0.08% of the machines of 4 chips fail in a day; cables and switches, "
            "which are routed around, are not counted (Zu et al., NSDI 2024, section 5, "
            "https://www.usenix.org/conference/nsdi24/presentation/zu)",
        ),
    )
}  # fmt: skip


def default(topology: Topology) -> FailureRate:
    """Returns the published rate of the chips that resemble a topology's chips most."""
    return RATES[topology.chip.failures]


def get(text: str, flag: str = "failures") -> FailureRate:
    """Returns the rate of a published name, or of a number of chip-hours.

    Args:
      text: a key of RATES, or the mean chip-hours between two failures, such as "5e4".
      flag: the flag that has the text, for error messages.

    Raises:
      UserError: it is neither a name nor a positive number; names the flag and the nearest name.
    """
    if text in RATES:
        return RATES[text]
    try:
        hours = float(text)
    except ValueError:
        raise UserError(
            f"`{flag}={text}`: neither a published rate nor a number of chip-hours between two "
            f"failures, such as 5e4. {names.nearest(text, RATES)}"
        ) from None
    if not 0 < hours < math.inf:
        raise UserError(
            f"`{flag}={text}`: expected more than 0 chip-hours between two failures, such as 5e4"
        )
    return FailureRate(f"{hours:g} chip-hours", hours, None, f"`{flag}={text}`")
