"""Goodput as Young has it, to compare with."""

from lingvo_gshard.wings.planning.training.formulas import Interruptions


def first_order_goodput(costs: Interruptions, interval: float) -> float:
    """Returns Young's goodput, to first order in the losses by a checkpoint and by a failure."""
    overhead = costs.stall / interval
    lost = (interval + costs.stall) / 2 + costs.write + costs.restart
    return 1 / (1 + overhead + lost / costs.between_failures)
