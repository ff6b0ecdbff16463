"""Log lines about the spikes of a run."""

from __future__ import annotations

from lingvo_gshard.training.monitoring.metrics import Row

_MOST_LINES = 20


class SpikeLog:
    """Tells of spikes from the metrics of `Spikes`."""

    def __init__(self, policy: str):
        """Makes the log of one run.

        Args:
          policy: `trainer.spikes.policy`.
        """
        self._end = "it was trained on" if policy == "warn" else "its update was discarded"
        self._lines = 0
        self._last: Row = {}

    def add(self, step: int, row: Row) -> str:
        """Adds the metrics of a step. Returns a line to show if it is a spike, else ''."""
        self._last = row
        # A mean over workers is positive if the step of any of them is a spike.
        if not row.get("spike"):
            return ""
        self._lines += 1
        if self._lines > _MOST_LINES:
            return ""
        return (
            f"Warning: step {step:,} is a spike, and {self._end}: loss {row['loss']:.4g} is "
            f"{row['loss_deviations']:.1f} deviations above its running mean, gradient norm "
            f"{row['gradient_norm']:.4g} is {row['gradient_norm_deviations']:.1f}"
        )

    def summary(self) -> list[str]:
        """Returns a line with the number of spikes of the run, if there were any."""
        count = self._last.get("spikes", 0.0)
        if not count:
            return []
        return [f"spikes: {count:,.0f} since the first step of the run (metrics.jsonl has each)"]
