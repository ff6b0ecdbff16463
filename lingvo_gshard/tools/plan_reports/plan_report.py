"""Prints a plan: the verdict first, then memory, communication, arithmetic, time and cost."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from lingvo_gshard.tools.console import Console, make_table, units, with_flags
from lingvo_gshard.tools.plan_reports import goodput_report, loads_report, memory_tables
from lingvo_gshard.wings.planning.machines import compilers
from lingvo_gshard.wings.planning.plan.plan import Plan, Remedy
from lingvo_gshard.wings.planning.roofline import Budget


def print_plan(plan: Plan, console: Console) -> None:
    """Prints a plan. Long tables are cut and give the number of hidden rows."""
    _print_verdict(console, plan)
    _print_remedies(console, plan.remedies)
    memory_tables.print_memory(console, plan.bytes_per_device)
    memory_tables.print_layer_sizes(console, plan.tensors)
    memory_tables.print_tensors(console, plan.tensors)
    memory_tables.print_temporaries(console, plan.largest_temporaries)
    memory_tables.print_collectives(console, plan.collectives)
    memory_tables.print_host_transfers(console, plan.host_transfers)
    memory_tables.print_arithmetic(console, plan.flops)
    memory_tables.print_layer_times(console, plan.layers)
    _print_totals(console, plan)
    _print_budget(console, plan.budget)
    if plan.loads:
        loads_report.print_loads(plan.loads, plan.seconds_per_step, console)
    if plan.goodput:
        goodput_report.print_goodput(plan.goodput, console)
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    seconds = units.in_seconds(plan.compile_seconds)
    console.say(f"\nCompiled in {seconds}; partitioner {plan.partitioner}; {versions}")
    for note in [*plan.notes, *(plan.loads.notes if plan.loads else [])]:
        console.say(f"Note: {note}")


def _print_verdict(console: Console, plan: Plan) -> None:
    memory = plan.bytes_per_device
    room = memory.capacity - memory.peak
    margin = f"{units.in_bytes(abs(room))} {'to spare' if room >= 0 else 'too much'}"
    console.say(
        f"{'It fits' if plan.fits else 'It does not fit'}: peak {units.in_bytes(memory.peak)} of "
        f"{units.in_bytes(memory.capacity)} usable per device "
        f"({units.in_share(memory.peak / (memory.capacity or 1))}), {margin}.",
        style="bold green" if plan.fits else "bold red",
    )
    console.say(
        f"{plan.name} on {plan.topology} ({plan.devices:,} devices, {plan.chip}), mesh "
        f"{plan.mesh or 'none'}, strategy {plan.strategy_name or 'none'}"
    )
    if plan.strategy:
        console.say(f"  {plan.strategy}")
    if plan.compiler == "cpu":
        chip = "" if plan.topology.startswith("cpu:") else ", not this chip"
        console.say(f"Compiled for CPU devices{chip}: memory and communication are an estimate.")
    else:
        package = compilers.PACKAGES[plan.compiler]
        version = plan.versions.get(package, "of an unknown version")
        console.say(f"Compiled by {package} {version}, the compiler of {plan.chip}.")
    console.say(
        f"{units.digits(plan.steps_per_second)} steps/s (estimate), at most "
        f"{units.digits(plan.steps_per_second_bound)} (bound); "
        f"{units.in_large(plan.tokens_per_second)} tokens/s; MFU {units.in_share(plan.mfu)}"
    )


def _print_remedies(console: Console, remedies: Sequence[Remedy]) -> None:
    if not remedies:
        return
    columns = ("fits", "peak", "step", "tokens/s", "USD for 1e9 tokens")
    table = make_table("changes tried", right=columns)
    for row in remedies:
        table.add_row(
            escape(with_flags(row.change + (f"\n  {row.reason}" if row.reason else ""))),
            "yes" if row.fits else "no",
            units.in_bytes(row.peak),
            units.in_seconds(row.seconds_per_step),
            units.in_large(row.tokens_per_second),
            units.in_large(row.price),
        )
    console.print_table(table)
    for row in remedies:
        if row.fits:
            console.say(f"It fits with {with_flags(row.change)}")
    if not any(row.fits for row in remedies):
        console.say(with_flags("No change that was tried fits. `search` tries other meshes."))


def _print_totals(console: Console, plan: Plan) -> None:
    console.say(
        f"\nA step of {units.in_count(plan.tokens_per_step)} tokens takes "
        f"{units.in_seconds(plan.seconds_per_step)} (estimate), at least "
        f"{units.in_seconds(plan.seconds_per_step_bound)} (bound, with communication fully "
        "overlapped)."
    )
    moved = {"communication": plan.collectives, "copies to and from the host": plan.host_transfers}
    for what, rows in moved.items():
        if rows:
            hidden = units.in_seconds(sum(row.hidden_seconds for row in rows))
            exposed = units.in_seconds(sum(row.seconds for row in rows))
            console.say(
                f"Computation hides {hidden} of the {what}; the step waits for the other {exposed}."
            )
    console.say(
        f"The model has {units.in_large(plan.parameters.total)} parameters, "
        f"{units.in_large(plan.parameters.active)} of them active per token."
    )


def _print_budget(console: Console, budget: Budget | None) -> None:
    if budget is None:
        return
    costs = [f"{units.in_large(budget.chip_hours)} chip-hours"]
    if budget.kilowatt_hours is not None:
        costs.append(f"{units.in_large(budget.kilowatt_hours)} kWh")
    if budget.price is not None:
        costs.append(f"{units.in_large(budget.price)} {budget.currency}")
    console.say(f"{units.in_large(budget.tokens)} tokens cost {', '.join(costs)}.")
    for source in budget.sources:
        console.say(f"  {source}")
