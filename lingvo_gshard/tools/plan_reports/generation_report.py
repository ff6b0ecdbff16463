"""Prints a plan of generation: the verdict, memory, speed and cost."""

from __future__ import annotations

import rich.console

from lingvo_gshard.planning.largest_batch import LargestBatch
from lingvo_gshard.planning.plan.generation_plan import GenerationPlan
from lingvo_gshard.planning.plan.plan import Plan
from lingvo_gshard.planning.roofline import Budget
from lingvo_gshard.tools.console import units
from lingvo_gshard.tools.plan_reports import time_tables
from lingvo_gshard.tools.plan_reports.layout import make_table, print_table, say


def print_largest_batch(found: LargestBatch, console: rich.console.Console) -> None:
    """Prints the largest batch that fits, the batches that were compiled, and its plan."""
    if not found.batch:
        say(console, "No batch fits: one text is too much.", style="bold red")
    elif found.next_batch is None:
        say(console, f"{found.batch:,} texts fit, the most that are tried.", style="bold green")
    else:
        say(
            console,
            f"The largest batch has {found.batch:,} texts: {found.next_batch:,} do not fit.",
            style="bold green",
        )
    table = make_table("texts", right=("fits", "peak", "of capacity", "tokens/s"))
    for trial in found.trials:
        table.add_row(
            f"{trial.batch:,}",
            "yes" if trial.fits else "no",
            units.in_bytes(trial.peak),
            units.in_share(trial.peak / trial.capacity),
            units.in_large(trial.tokens_per_second),
        )
    print_table(console, table)
    print_generation(found.plan, console)


def print_generation(plan: GenerationPlan, console: rich.console.Console) -> None:
    """Prints a plan of generation."""
    step = plan.step
    say(
        console,
        f"{'It fits' if plan.fits else 'It does not fit'}: {step.topology} ({step.devices:,} "
        f"devices, {step.chip}), mesh {step.mesh}, strategy {step.strategy_name}",
        style="bold green" if plan.fits else "bold red",
    )
    say(
        console,
        f"{plan.batch:,} texts of {plan.length:,} positions; keys and values take "
        f"{units.in_bytes(plan.cache_bytes_per_text)} for each text, "
        f"{units.in_bytes(plan.cache_bytes)} per device.",
    )
    say(
        console,
        f"A token for each text takes {units.in_seconds(plan.seconds_per_token)} (estimate), at "
        f"least {units.in_seconds(step.seconds_per_step_bound / plan.steps)} (bound): "
        f"{units.in_large(step.tokens_per_second)} tokens/s, bounded by {plan.bounded_by}.",
    )
    if plan.prefill:
        prefill = plan.prefill
        texts = (prefill.tokens_per_step or 0) // plan.prompt
        say(
            console,
            f"Prefill of {texts} texts of {plan.prompt:,} tokens takes "
            f"{units.in_seconds(prefill.seconds_per_step)}: "
            f"{units.in_large(prefill.tokens_per_second)} tokens/s, "
            f"MFU {units.in_share(prefill.mfu)}.",
        )
    _print_cost(console, "generated tokens", plan.generated)
    _print_cost(console, "tokens of prompts", plan.prompted)
    _print_memory(console, plan)
    time_tables.print_collectives(console, step.collectives)
    time_tables.print_layer_times(console, step.layers)
    say(console, f"Times and collectives are those of a call that decodes {plan.steps} steps.")
    say(
        console,
        f"The model has {units.in_large(step.parameters.total)} parameters, "
        f"{units.in_large(step.parameters.active)} of them active per token.",
    )
    for note in dict.fromkeys([*step.notes, *(plan.prefill.notes if plan.prefill else ())]):
        say(console, f"Note: {note}")


def _print_cost(console: rich.console.Console, what: str, cost: Budget | None) -> None:
    if cost is None:
        return
    price = "no price is published"
    if cost.price is not None:
        price = f"{units.in_large(cost.price)} {cost.currency}"
    hours = f"{units.in_large(cost.chip_hours)} chip-hours"
    say(console, f"A million {what} cost {hours}, {price}.")


def _print_memory(console: rich.console.Console, plan: GenerationPlan) -> None:
    """Prints a table with a column for each program."""
    programs: list[tuple[str, Plan]] = [("decoding", plan.step)]
    if plan.prefill:
        programs.append(("prefill", plan.prefill))
    names = [name for name, _ in programs]
    table = make_table("memory of one device", right=names)
    for field, text in (
        ("weights", "weights"),
        ("inputs", "keys, values and other inputs"),
        ("activations", "activations, temporaries"),
        ("program", "program"),
        ("peak", "peak"),
        ("capacity", "capacity"),
    ):
        sizes = [units.in_bytes(getattr(each.bytes_per_device, field)) for _, each in programs]
        table.add_row(text, *sizes)
    print_table(console, table)
