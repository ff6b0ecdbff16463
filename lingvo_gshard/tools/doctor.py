"""Checks an installation and its machine: is everything there for training, and right, and fast?

    gshard-doctor
    gshard-doctor --devices=8
    gshard-doctor --json=health.json

It checks, in this order:

- Python and the required packages, against the versions that were tested (constraints.txt)
- settings of the environment that jax, XLA, TensorFlow or libtpu read, and what each changes
- cores, free memory, limits of the system, free disk
- the devices that jax finds, and accelerators that it does not
- a matrix product, timed, and compared with NumPy and with the chip's published rate
- each collective over all devices, timed, and compared with NumPy and with the published links
- a small model with experts: steps of training split over the devices, and on one device

--devices sets their number. Without accelerators, virtual CPU devices share the cores: their
collectives are right or wrong as real ones are, but their rates say nothing.

The exit code is 1 if a check failed, and 0 if there are only warnings.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import rich.console
from absl import flags
from rich.markup import escape

from lingvo_gshard.core import Progress
from lingvo_gshard.core.lazy import Device
from lingvo_gshard.runtime import devices
from lingvo_gshard.tools.console import output, startup
from lingvo_gshard.tools.console.stages import planning_stages
from lingvo_gshard.tools.console.tables import print_rows
from lingvo_gshard.tools.diagnosis import environment, speed
from lingvo_gshard.tools.diagnosis.environment import Check, State
from lingvo_gshard.tools.flags.definitions import integer, make_flags
from lingvo_gshard.wings.planning.machines import chips
from lingvo_gshard.wings.services import run_records

# Devices that are made where there is no accelerator.
_VIRTUAL_DEVICES = 2
_COLORS = {State.OK: "green", State.WARNING: "yellow", State.FAILURE: "bold red"}


def define_flags() -> flags.FlagValues:
    """Returns this command's flags."""
    return make_flags(
        devices=integer(
            "Number of devices to check; 0: all accelerators, or two virtual CPU devices.", 0, 0
        ),
        json=output.json_flag("all checks"),
    )


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    values = startup.parse_flags(define_flags(), argv, __doc__)
    output.check_writable(values, "json")
    console = output.make_console(values.json)
    with planning_stages() as progress:
        checks = list(_checks(values.devices, progress))
    _print(console, checks)
    states = [check.state for check in checks]
    output.write_json(values.json, {"checks": [dataclasses.asdict(check) for check in checks]})
    return 1 if State.FAILURE in states else 0


def _checks(count: int, progress: Progress) -> Iterator[Check]:
    """Yields all checks of `count` devices; 0 takes all accelerators, or virtual CPU devices."""
    progress.begin("checking versions")
    yield from environment.check_versions()
    yield from environment.check_environment(run_records.environment_at_start())
    yield from speed.check_host()
    progress.begin("checking devices")
    found = _devices(count)
    chip = chips.of_device(found[0].platform, found[0].device_kind)
    yield from speed.check_devices(found)
    progress.begin("checking a product")
    yield speed.check_product(found[0], chip)
    progress.begin("checking collectives")
    yield from speed.check_collectives(found, chip)
    progress.begin("checking a sharded step")
    yield speed.check_step(found)


def _devices(count: int) -> Sequence[Device]:
    """Returns the devices to check: `count` devices; for 0 all accelerators, or virtual devices."""
    devices.let_jax_choose_devices()
    found = devices.devices_for(count or _VIRTUAL_DEVICES)
    return found if count else devices.devices_for(None)


def _print(console: rich.console.Console, checks: Sequence[Check]) -> None:
    rows = [
        (
            check.name,
            f"[{_COLORS[check.state]}]{check.state.value}[/]",
            escape(check.found),
            escape(check.advice),
        )
        for check in checks
    ]
    print_rows(console, ("check", "", "found", "what to do"), (), rows)
    count = collections.Counter(check.state for check in checks)
    output.say(
        console,
        f"{count[State.OK]} ok, {count[State.WARNING]} warnings, {count[State.FAILURE]} failures",
    )
