"""Closed formulas of checkpoint intervals and goodput, for failures that come at a constant rate.

Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974,
https://doi.org/10.1145/361147.361115. Daly, A higher order estimate of the optimum checkpoint
interval for restart dumps, FGCS 22(3), 2006, https://doi.org/10.1016/j.future.2004.11.016.

All times are in seconds. "Interval" is the work between two checkpoints, without the checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from lingvo_gshard.core import UserError, names, objects
from lingvo_gshard.core.lazy import optimize
from lingvo_gshard.wings.planning.machines.topologies import Topology

# If the exponent is larger than this, the goodput is taken to be 0.
_LARGEST_EXPONENT = 600.0


@dataclasses.dataclass(frozen=True)
class Interruptions:
    """The cost of failures and checkpoints in a training.

    Attributes:
      between_failures: mean time between two failures of the whole machine.
      stall: time that training waits for each checkpoint.
      write: time after the stall until the checkpoint is complete; training goes on meanwhile.
      restart: time from a failure until training goes on, the restored state included.
    """

    between_failures: float
    stall: float
    write: float
    restart: float


def young_interval(costs: Interruptions) -> float:
    """Returns Young's interval, sqrt(2 stall M), where M is the mean time between failures."""
    return math.sqrt(2 * costs.stall * costs.between_failures)


def daly_interval(costs: Interruptions) -> float:
    """Returns Daly's interval of higher order (equation 37)."""
    mean, stall = costs.between_failures, costs.stall
    if stall >= 2 * mean:
        return mean
    ratio = stall / (2 * mean)
    return math.sqrt(2 * stall * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def best_interval(costs: Interruptions, shortest: float = 0.0) -> float:
    """Returns the interval of the highest goodput.

    With M the mean time between failures, x = interval / M is the root of
    (1 - x) exp(x) = exp(-stall / M), where the derivative of Daly's complete model is 0. The
    interval does not depend on the restart or on writing in the background, except that one write
    must end before the next write begins.
    """
    target = math.exp(-costs.stall / costs.between_failures)
    # The function falls on (0, 1).
    x: Any = optimize.brentq(lambda x: (1 - x) * math.exp(x) - target, 0.0, 1.0, xtol=1e-15)
    return max(x * costs.between_failures, costs.write - costs.stall, shortest)


def expected_goodput(costs: Interruptions, interval: float) -> float:
    """Returns the part of a long training's time that makes progress.

    Daly's complete model (equation 20): failures may also come during checkpoints and restarts.
    Work counts once its checkpoint is complete, so writing in the background appears as a factor
    like a restart: an attempt that lasts t seconds keeps floor((t - restart - write) / (interval +
    stall)) intervals, attempts last M seconds on average, and their ratio is this formula.
    """
    mean = costs.between_failures
    period = (interval + costs.stall) / mean
    fixed = (costs.restart + costs.write) / mean
    if period + fixed > _LARGEST_EXPONENT:
        return 0.0
    return interval / mean * math.exp(-fixed) / math.expm1(period)


@dataclasses.dataclass(frozen=True)
class FailureRate:
    """A rate of interruptions, as the mean time of one chip.

    Attributes:
      chip_hours: mean chip-hours between two interruptions of a training.
      count: number of interruptions that were counted; None if it is not published. The fewer they
        are, the less certain is the rate.
      source: what was counted, and where it is published.
    """

    name: str
    chip_hours: float
    source: str
    count: int | None = None


# Figures of failures, jobs and budgets, as figures.toml explains them.
FIGURES = objects.table_beside(__file__, "figures.toml", dict[str, Any])
RATES = {name: FailureRate(name, **stated) for name, stated in FIGURES["failure_rates"].items()}


def default(topology: Topology) -> FailureRate:
    """Returns the published rate of the chips that resemble a topology's chips most."""
    return RATES[topology.chip.failures]


def get(text: str, flag: str = "failures") -> FailureRate:
    """Returns the rate of a published name, or of mean chip-hours between failures, such as "5e4".

    Raises:
      UserError: it is neither a name nor a positive number; names the option and the nearest name.
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
    return FailureRate(f"{hours:g} chip-hours", hours, f"`{flag}={text}`")
