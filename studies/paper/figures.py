"""Published figures of the GShard paper: memory, speed and cost of its experiments.

Lepikhin et al., GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding,
2020, https://arxiv.org/abs/2006.16668, version 1. The planner itself does not use them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

_MILLION = 2**20
_SECONDS_PER_DAY = 86_400


@dataclasses.dataclass(frozen=True)
class Training:
    """A row of the paper's table of models.

    Attributes:
      cores: number of TPU v3 cores.
      weights: number of weights, rounded as in the table.
      batch: tokens of a step.
      core_years: cost of the training.
      days: duration of the training.
      steps_per_second: speed; None for rows that we do not have it for.
    """

    cores: int
    weights: float
    batch: int
    core_years: float
    days: float
    steps_per_second: float | None = None

    @property
    def tokens(self) -> float | None:
        """Returns the number of training tokens: steps/s times days times the batch."""
        if self.steps_per_second is None:
            return None
        return self.steps_per_second * self.days * _SECONDS_PER_DAY * self.batch


TABLE_PLACE = "section 4, table of models"
TABLE: Mapping[str, Training] = {
    "moe_128e_12l": Training(128, 12.5e9, _MILLION, 1.9, 5.4),
    "moe_128e_36l": Training(128, 37e9, _MILLION, 6.1, 17.3),
    "moe_512e_12l": Training(512, 50e9, _MILLION, 4.9, 3.5, 3.28),
    "moe_512e_36l": Training(512, 150e9, _MILLION, 15.5, 11.0, 1.05),
    "moe_2048e_12l": Training(2048, 200e9, 4 * _MILLION, 7.5, 1.4),
    "moe_2048e_36l": Training(2048, 600e9, 4 * _MILLION, 22.4, 4.0),
    "dense_96l": Training(2048, 2.3e9, 4 * _MILLION, 235.5, 42.0),
}

# GB of a core, read off the figure; we take a GB to be 1e9 bytes.
MEMORY_PLACE = "figure 7, read off"
WEIGHTS_GB = {"moe_128e_12l": 1.87, "moe_512e_12l": 2.04, "moe_2048e_36l": 6.01}
ACTIVATIONS_GB = {"moe_128e_12l": 2.30, "moe_512e_12l": 2.18, "moe_2048e_36l": 5.98}

SECTION_5_PLACE = "section 5"
# Share of the step's cycles.
REMATERIALIZATION = {"moe_512e_12l": 0.0, "moe_512e_36l": 0.28, "moe_2048e_60l": 0.34}
ALL_TO_ALL_GROWTH_128_TO_2048 = 3.75
ATTENTION_SHARE_OF_PEAK = 0.30
