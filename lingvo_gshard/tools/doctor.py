"""Checks an installation and its machine: is everything there for training, and right, and fast?"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

from rich.markup import escape

from lingvo_gshard.core import Device, Progress
from lingvo_gshard.runtime import devices
from lingvo_gshard.tools.console import output, stages_with_lines, startup
from lingvo_gshard.tools.diagnosis import environment, speed
from lingvo_gshard.tools.diagnosis.accelerator import checks as accelerator
from lingvo_gshard.tools.diagnosis.accelerator import report
from lingvo_gshard.tools.diagnosis.accelerator.trials import Machine
from lingvo_gshard.tools.diagnosis.environment import Check, State
from lingvo_gshard.tools.flags.definitions import integer, maker, refuse, string, switch
from lingvo_gshard.wings.services import run_records

# Devices that are made where there is no accelerator.
_VIRTUAL_DEVICES = 2
_COLORS = {
    State.OK: "green",
    State.WARNING: "yellow",
    State.FAILURE: "bold red",
    State.SKIPPED: "dim",
}

define_flags = maker(
    accelerator=switch("Whether kernels, exchanges and layers are checked and measured, too."),
    devices=integer(
        "Number of devices to check; 0: all accelerators, or two virtual CPU devices.", 0, 0
    ),
    page=string("Markdown file that --accelerator writes.", "accelerator.md"),
    json=output.json_flag("all checks"),
)


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    values = startup.parse_flags(define_flags(), argv, __doc__, __name__)
    if not values.accelerator:
        refuse(values, ("page",), "applies to --accelerator")
    output.check_writable(values, "json", *(["page"] if values.accelerator else []))
    console = output.make_console(values.json, values.page)
    with stages_with_lines() as progress:
        machine = Machine(_devices(values.devices))
        checks = list(_checks(machine, progress, values.accelerator))
        _print(console, checks)
        measured = []
        if values.accelerator:
            for check in accelerator.run_checks(machine, progress):
                measured.append(check)
                output.write_text(values.page, report.page(measured, machine), "page")
    if values.accelerator:
        _print_accelerator(console, measured, machine, values.page)
    record = {"checks": [dataclasses.asdict(check) for check in (*checks, *measured)]}
    if values.accelerator:
        record |= {
            "machine": report.facts(machine),
            "settings": list(report.settings(measured, machine)),
            "points": report.points(measured),
        }
    output.write_json(values.json, record)
    return 1 if State.FAILURE in {check.state for check in (*checks, *measured)} else 0


def _checks(machine: Machine, progress: Progress, has_more: bool) -> Iterator[Check]:
    """Yields the checks of a machine.

    With `has_more` it leaves products, collectives and steps to the checks of an accelerator.
    """
    progress.begin("checking versions")
    yield from environment.check_versions()
    yield from environment.check_environment(run_records.environment_at_start())
    yield from speed.check_host()
    progress.begin("checking devices")
    yield from speed.check_devices(machine.devices)
    if has_more:
        return
    progress.begin("checking a product")
    yield speed.check_product(machine)
    progress.begin("checking collectives")
    yield from speed.check_collectives(machine)
    progress.begin("checking a sharded step")
    yield speed.check_step(machine.devices)


def _devices(count: int) -> Sequence[Device]:
    """Returns the devices to check: `count` devices; for 0 all accelerators, or virtual devices."""
    devices.let_jax_choose_devices()
    found = devices.devices_for(count or _VIRTUAL_DEVICES)
    return found if count else devices.devices_for(None)


def _print(console: output.Console, checks: Sequence[Check]) -> None:
    rows = [
        (check.name, _colored(check.state), escape(check.found), escape(check.advice))
        for check in checks
    ]
    console.print_rows(("check", "", "found", "what to do"), (), rows)
    count = collections.Counter(check.state for check in checks)
    said = f"{count[State.OK]} ok, {count[State.WARNING]} warnings, {count[State.FAILURE]} failures"
    console.say(said)


def _print_accelerator(
    console: output.Console, checks: Sequence[Check], machine: Machine, page: str
) -> None:
    """Prints the table of an accelerator, what is not right, and what to set."""
    rows = []
    for check in checks:
        name, _, *times = report.row(check)
        rows.append((escape(name), _colored(check.state), *times))
    console.print_rows(report.HEADINGS[:2], report.HEADINGS[2:], rows, "share: of the plan")
    skipped = collections.defaultdict(list)
    for check in checks:
        if check.state == State.SKIPPED:
            skipped[check.found].append(check.name)
        elif check.state != State.OK:
            console.say(f"{check.state.value}: {check.name}: {check.found}. {check.advice}")
    for reason, names in skipped.items():
        console.say(f"skipped: {'; '.join(names)}: {reason}")
    if machine.is_virtual:
        console.say(report.VIRTUAL)
    for each in report.settings(checks, machine):
        console.say(f"set {each.setting}: {each.why}")
    count = collections.Counter(check.state for check in checks)
    said = ", ".join(f"{count[state]} {state.value}" for state in State if count[state])
    console.say(f"{said}; {page} has all, and what to report")


def _colored(state: State) -> str:
    return f"[{_COLORS[state]}]{state.value}[/]"
