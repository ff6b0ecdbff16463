"""Simulates agents of many hosts that fail at published rates, at a simulated meeting place.

    python -m benchmarks agents --hosts=256 --days=30 --place=gcs
    python -m benchmarks agents --hosts=4 --days=0.1 --failures=12 --rare --seeds=1,2,3

The agents are the library's own: how they meet, who leads, what the leader decides, and whom it
blames. Time, the meeting place, workers and snapshots are simulated. By default hosts fail at the
rate of Llama 3's training (arXiv 2407.21783, section 3.3.4). With --rare, agents are killed, hosts
are asked to stop or cut off, and the meeting place delays, loses and refuses messages, too.

A row with problems breaks what agents promise: two rounds compute at once, a saved step is lost, or
a host is blamed for another one's failure. The exit code is then 1. A day of 2,048 hosts takes a
minute of a core.
"""

from __future__ import annotations

import time

from absl import flags

from benchmarks import common
from benchmarks.agents.place import KINDS
from benchmarks.agents.world import FAILURES_PER_HOST_DAY, Setting, World, WorldRow
from lingvo_gshard.core import Progress, names
from lingvo_gshard.tools.console import Console, make_table, transient_stages
from lingvo_gshard.tools.flags.definitions import comma_list, decimal, define, string, switch

# Seconds between signs, and until a host is lost, as docs/clusters.md advises.
_BEATS = {"nfs": (1.0, 20.0), "gcs": (5.0, 30.0)}
_MINUTE = 60.0
_COLUMNS = {
    "failures": "{0.failures}",
    "rounds": "{0.rounds}",
    "recovery": "{0.recovery_seconds:.0f}",
    "slowest": "{0.slowest_seconds:.0f}",
    "goodput": "{0.goodput:.1%}",
    "reads/s": "{0.reads:,.0f}",
    "peak": "{0.peak_reads:,.0f}",
    "writes/s": "{0.writes:,.0f}",
    "MB/s": "{0.read_megabytes:,.1f}",
    "leader": "{0.lead_seconds:.2f}",
}


def define_flags() -> flags.FlagValues:
    """Returns this subcommand's flags."""
    values = common.define_flags(experiment=False)
    common.define_integer(values, "hosts", 256, "Hosts that train.")
    define(
        values,
        standby=decimal("Further hosts, as a share of those that train.", 1 / 128, 0),
        days=decimal("Simulated days.", 30.0, 0.01),
        failures=decimal("Failures of a host in a day.", FAILURES_PER_HOST_DAY, 0),
        place=string(f"The meeting place: {', '.join(KINDS)}.", "gcs"),
        start_seconds=decimal("Time of workers until their first step.", 120.0, 0),
        rare=switch("Whether rare failures happen, too, and hosts are repaired within minutes."),
        seeds=comma_list("Seeds, a world for each.", ["1"]),
    )
    return values


class _Teller:
    """Shows on a terminal how far a world is, and prints it every minute elsewhere."""

    def __init__(self, console: Console, progress: Progress, stage: str):
        """Begins a world."""
        self._console, self._progress, self._stage = console, progress, stage
        self._began = self._told = time.monotonic()

    def __call__(self, share: float) -> None:
        """Shows that a share of the world is over."""
        self._progress.update(0, share)
        now = time.monotonic()
        if now - self._told > _MINUTE and not self._console.is_terminal:
            left = (now - self._began) * (1 / share - 1) / _MINUTE
            self._console.print(f"{self._stage}: {share:.0%}, {left:.0f} minutes left")
            self._told = now


def run(values: flags.FlagValues, console: Console) -> int:
    """Simulates, prints the table, writes the rows, and returns the exit code.

    Raises:
      UserError: the place is unknown, or a seed is no number.
    """
    names.check(values.place, KINDS, f"--place={values.place} is unknown")
    beat_seconds, lost_seconds = _BEATS[values.place]
    setting = Setting(
        values.hosts,
        max(1, round(values.standby * values.hosts)),
        max(1, values.hosts // 2) if values.rare else values.hosts,
        values.days,
        values.failures,
        values.place,
        beat_seconds,
        lost_seconds,
        values.start_seconds,
        values.rare,
    )
    rows: list[WorldRow] = []
    with transient_stages(console, "starting") as progress:
        for seed in common.numbers("seeds", values.seeds):
            stage = f"simulating {setting.hosts:,} hosts, seed {seed}"
            progress.begin(stage)
            rows.append(World(setting, seed).run(_Teller(console, progress, stage)))
            for problem in rows[-1].problems:
                console.print(f"seed {seed}: {problem}")
    caption = "seconds from a failure to the next step: median and longest; leader: of one turn"
    table = make_table("world", right=tuple(_COLUMNS), caption=caption)
    for row in rows:
        cells = [text.format(row) for text in _COLUMNS.values()]
        table.add_row(f"{row.name}, seed {row.seed}", *cells)
    console.print_table(table)
    return common.write(values, rows, "simulated") or int(any(row.problems for row in rows))
