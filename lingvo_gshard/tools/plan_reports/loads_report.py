"""Prints a plan under the loads of routers: time, dropped tokens, devices and a placement."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from lingvo_gshard.tools.console import MAX_ROWS, Console, make_table, units
from lingvo_gshard.tools.plan_reports import memory_tables
from lingvo_gshard.wings.planning.generation import GenerationPlan
from lingvo_gshard.wings.planning.largest_batch import LargestBatch
from lingvo_gshard.wings.planning.loads.file import LayerLoads, Quantiles, RouterLoads
from lingvo_gshard.wings.planning.roofline import Budget

_NAMES = ("p50", "p90", "p99", "worst")
_HEADINGS = ("50% of steps", "90%", "99%", "worst")


def print_loads(loads: RouterLoads, seconds: float, console: Console) -> None:
    """Prints what a step takes under loads, next to the seconds of the plan with even loads."""
    steps = f"{loads.steps:,} steps, {loads.first_step:,} to {loads.last_step:,}"
    if loads.steps == 1:
        steps = f"step {loads.first_step:,}"
    slowest = max(loads.layers, key=lambda layer: layer.slowest.p50)
    console.say(
        f"\nLoads of {loads.path} ({steps}): the slowest device has "
        f"{slowest.slowest.p50:.2f}x the mean's rows in half of the steps, "
        f"{slowest.slowest.worst:.2f}x in the worst ({slowest.layer}).",
        style="bold",
    )
    _print_steps(console, loads, seconds)
    _print_layers(console, loads.layers)
    _print_buffers(console, loads.layers)
    _print_placement(console, loads)


def _print_steps(console: Console, loads: RouterLoads, seconds: float) -> None:
    times = {"time": loads.step_seconds}
    if loads.step_seconds_placed != loads.step_seconds:
        times["time with the placement below"] = loads.step_seconds_placed
    if loads.step_seconds_dropping_nothing:
        times["time with buffers that drop nothing"] = loads.step_seconds_dropping_nothing
    rows = [(name, *map(units.in_seconds, _values(each))) for name, each in times.items()]
    rows.append(("dropped", *map(units.in_fine_share, _values(loads.dropped_share))))
    title = f"a step; {units.in_seconds(seconds)} with even loads"
    console.print_rows((title,), _HEADINGS, rows)


def _print_layers(console: Console, layers: Sequence[LayerLoads]) -> None:
    table = make_table(
        "rows of the slowest device",
        right=("devices", "50%", "90%", "worst", "placed", "busiest expert", "dropped"),
    )
    for layer in layers[:MAX_ROWS]:
        table.add_row(
            escape(f"{layer.layer}\n  {layer.router}, {layer.dispatch}"),
            f"{layer.devices:,}",
            *(f"{value:.2f}x" for value in (layer.slowest.p50, layer.slowest.p90)),
            f"{layer.slowest.worst:.2f}x",
            f"{layer.placed.p50:.2f}x",
            f"{layer.busiest_expert} ({layer.busiest_over_mean:.2f}x)",
            units.in_fine_share(layer.dropped_share.p50 if layer.dropped_share else None),
        )
    console.print_table(table)
    console.say_hidden(layers[MAX_ROWS:])


def _print_buffers(console: Console, layers: Sequence[LayerLoads]) -> None:
    factors = [(x, "capacity_factor", x.capacity_factor, x.sufficient_factor) for x in layers]
    bounds = [(x, "bound", x.bound or None, x.sufficient_bound) for x in layers]
    rows = [
        (escape(layer.layer), option, *map(_factor, (planned, *_values(found))))
        for layer, option, planned, found in (*factors, *bounds)
        if found
    ]
    if rows:
        right = ("option", "planned", *_HEADINGS)
        console.print_rows(("buffers that hold all rows",), right, rows[:MAX_ROWS])
        console.say_hidden(rows[MAX_ROWS:])


def _print_placement(console: Console, loads: RouterLoads) -> None:
    placed = [layer for layer in loads.layers if layer.placed != layer.slowest]
    if not placed:
        return
    table = make_table("placement: experts of each device")
    for layer in placed[:MAX_ROWS]:
        shown = [f"{d}: {_experts(e)}" for d, e in enumerate(layer.placement[:MAX_ROWS])]
        more = len(layer.placement) - len(shown)
        table.add_row(escape(layer.layer))
        table.add_row("  " + "  ".join([*shown, *([f"and {more} more devices"] if more else [])]))
        table.add_row(f"  {layer.gap:.1%} above the lower bound of all placements{_later(layer)}")
    console.print_table(table)
    console.say_hidden(placed[MAX_ROWS:])
    if loads.replica_bytes:
        console.say(f"Copies take {units.in_bytes(loads.replica_bytes)} of weights on a device.")


def _later(layer: LayerLoads) -> str:
    if layer.later is None:
        return ""
    return (
        f"; found from the earlier half of the steps, it has {layer.later_placed:.2f}x in the "
        f"later half, {layer.later:.2f}x without"
    )


def _experts(experts: Sequence[int]) -> str:
    shown = ", ".join(map(str, experts[:MAX_ROWS]))
    return f"{shown}, ..." if len(experts) > MAX_ROWS else shown


def _values(found: Quantiles | None) -> list[float | None]:
    return [getattr(found, name) if found else None for name in _NAMES]


def _factor(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def print_largest_batch(found: LargestBatch, console: Console) -> None:
    """Prints the largest batch that fits, the batches that were compiled, and its plan."""
    if not found.batch:
        console.say("No batch fits: one text is too much.", style="bold red")
    elif found.next_batch is None:
        console.say(f"{found.batch:,} texts fit, the most that are tried.", style="bold green")
    else:
        console.say(
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
    console.print_table(table)
    print_generation(found.plan, console)


def print_generation(plan: GenerationPlan, console: Console) -> None:
    """Prints a plan of generation."""
    step = plan.step
    console.say(
        f"{'It fits' if plan.fits else 'It does not fit'}: {step.topology} ({step.devices:,} "
        f"devices, {step.chip}), mesh {step.mesh}, strategy {step.strategy_name}",
        style="bold green" if plan.fits else "bold red",
    )
    console.say(
        f"{plan.batch:,} texts of {plan.length:,} positions; keys and values take "
        f"{units.in_bytes(plan.cache_bytes_per_text)} for each text, "
        f"{units.in_bytes(plan.cache_bytes)} per device."
    )
    console.say(
        f"A token for each text takes {units.in_seconds(plan.seconds_per_token)} (estimate), at "
        f"least {units.in_seconds(step.seconds_per_step_bound / plan.steps)} (bound): "
        f"{units.in_large(step.tokens_per_second)} tokens/s, bounded by {plan.bounded_by}."
    )
    if plan.prefill:
        prefill = plan.prefill
        texts = (prefill.tokens_per_step or 0) // plan.prompt
        console.say(
            f"Prefill of {texts} texts of {plan.prompt:,} tokens takes "
            f"{units.in_seconds(prefill.seconds_per_step)}: "
            f"{units.in_large(prefill.tokens_per_second)} tokens/s, "
            f"MFU {units.in_share(prefill.mfu)}."
        )
    _print_cost(console, "generated tokens", plan.generated)
    _print_cost(console, "tokens of prompts", plan.prompted)
    _print_memory(console, plan)
    console.say(f"Loading the weights takes {units.in_bytes(plan.loading_bytes)} of it at most.")
    memory_tables.print_collectives(console, step.collectives)
    memory_tables.print_layer_times(console, step.layers)
    console.say(f"Times and collectives are those of a call that decodes {plan.steps} steps.")
    console.say(
        f"The model has {units.in_large(step.parameters.total)} parameters, "
        f"{units.in_large(step.parameters.active)} of them active per token."
    )
    for note in dict.fromkeys([*step.notes, *(plan.prefill.notes if plan.prefill else ())]):
        console.say(f"Note: {note}")


def _print_cost(console: Console, what: str, cost: Budget | None) -> None:
    if cost is None:
        return
    price = "no price is published"
    if cost.price is not None:
        price = f"{units.in_large(cost.price)} {cost.currency}"
    console.say(f"A million {what} cost {units.in_large(cost.chip_hours)} chip-hours, {price}.")


def _print_memory(console: Console, plan: GenerationPlan) -> None:
    """Prints a table with a column for each program."""
    programs = {"decoding": plan.step} | ({"prefill": plan.prefill} if plan.prefill else {})
    table = make_table("memory of one device", right=tuple(programs))
    for field, text in (
        ("weights", "weights"),
        ("inputs", "keys, values and other inputs"),
        ("activations", "activations, temporaries"),
        ("program", "program"),
        ("peak", "peak"),
        ("capacity", "capacity"),
    ):
        sizes = (getattr(each.bytes_per_device, field) for each in programs.values())
        table.add_row(text, *map(units.in_bytes, sizes))
    console.print_table(table)
