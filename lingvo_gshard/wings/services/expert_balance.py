"""ExpertBalance: how evenly the experts of a run are used, in words."""

from __future__ import annotations

from lingvo_gshard.training import MetricsRow

# Names of the metrics of layers/moe/load_metrics.py.
LOAD, DROPPED, UTILIZATION, DEAD = (
    "load_max_over_mean",
    "dropped_share",
    "utilization",
    "dead_experts",
)


class ExpertBalance:
    """Summarizes the load metrics of a run; says nothing if the run has no experts.

    A step only appends its row of metrics. Rows are read at the end of a log interval.
    """

    def __init__(self):
        self._layers: list[str] | None = None
        self._rows: list[MetricsRow] = []
        self._last: list[MetricsRow] = []

    def add(self, row: MetricsRow) -> None:
        """Adds the metrics of one step."""
        self._rows.append(row)

    def digest(self, row: MetricsRow) -> str:
        """Returns the worst load of any layer in one step as a short text; '' without experts."""
        layers = self._layers_of(row)
        if not layers:
            return ""
        fullest = max(row[f"{layer}/{LOAD}"] for layer in layers)
        dropped = max(row[f"{layer}/{DROPPED}"] for layer in layers)
        dead = sum(row[f"{layer}/{DEAD}"] for layer in layers)
        words = f"fullest expert {fullest:.2f}x  dropped {dropped:.1%}"
        return f"{words}  dead experts {dead:.0f}" if dead else words

    def end_interval(self) -> None:
        """Ends the interval that `summary` covers."""
        self._last, self._rows = self._rows, []

    def summary(self) -> list[str]:
        """Returns a line for each layer with experts: means over the last complete interval."""
        if not self._last:
            return []

        def mean(name: str) -> float:
            return sum(row[name] for row in self._last) / len(self._last)

        layers = self._layers_of(self._last[0])
        steps = "step" if len(self._last) == 1 else f"{len(self._last):,} steps"
        head = (
            [f"Load of the experts in the last {steps} (1.00x is an even load):"] if layers else []
        )
        return head + [
            f"  {layer}  fullest {mean(f'{layer}/{LOAD}'):.2f}x  "
            f"slots used {mean(f'{layer}/{UTILIZATION}'):.1%}  "
            f"dropped {mean(f'{layer}/{DROPPED}'):.1%}  dead {mean(f'{layer}/{DEAD}'):.1f}"
            for layer in layers
        ]

    def _layers_of(self, row: MetricsRow) -> list[str]:
        """Returns the layers with experts, from the first row: all rows have the same names."""
        if self._layers is None:
            ends = f"/{DEAD}"
            self._layers = [name.removesuffix(ends) for name in row if name.endswith(ends)]
        return self._layers
