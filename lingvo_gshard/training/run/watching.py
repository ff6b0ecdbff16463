"""The Params of a trainer that say how its run is watched."""

from __future__ import annotations

from lingvo_gshard.core.config.params import Params


def define(p: Params) -> None:
    """Defines hyperparameters that change nothing of what a run computes."""
    p.define(
        "hang_factor",
        50.0,
        "The run ends if no step ends within so many times the median step; 0: it never does.",
        minimum=0,
    )
    p.define("hang_seconds", 600.0, "Least number of seconds that are a hang.", above=0)
    p.define("save_seconds", 1800.0, "Longest time that a step waits for a checkpoint.", above=0)
    p.define("update_ratios_every", 0, "Steps between update-to-weight ratios; 0: none.", minimum=0)
    p.define(
        "check_determinism_every",
        0,
        "Steps between those that are computed twice and compared; 0: none.",
        minimum=0,
    )
