"""What gshard-plan prints: a plan, the verdict first, and what changed between two."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import rich.box
import rich.console
import rich.table

from lingvo_gshard.planning.plan.diff import Change
from lingvo_gshard.planning.plan.file import MEMORY_CLASSES
from lingvo_gshard.tools.console import units

_MOST_ROWS = 12
_BAR_WIDTH = 30
_UNITS: dict[str, Callable[[Any], str]] = {
    "bytes": units.in_bytes,
    "seconds": units.in_seconds,
    "flops": units.in_flops,
    "count": units.in_count,
    "number": units.in_large,
    "rate": units.in_large,
    "share": units.in_share,
}
_CLASS_NAMES = {"activations": "activations, temporaries"}

Row = dict[str, Any]


def print_plan(plan: Row, console: rich.console.Console) -> None:
    """Prints a plan as `Plan.to_json` gives it; long tables are cut, and say by how much."""
    _print_verdict(console, plan)
    _print_remedies(console, plan.get("remedies") or [])
    _print_memory(console, plan["bytes_per_device"])
    _print_layers_held(console, plan["tensors"])
    _print_tensors(console, plan["tensors"])
    _print_temporaries(console, plan["largest_temporaries"])
    _print_collectives(console, plan["collectives"])
    _print_arithmetic(console, plan["flops"])
    _print_times(console, plan["layers"])
    _print_totals(console, plan)
    _print_budget(console, plan.get("budget"))
    versions = ", ".join(f"{name} {version}" for name, version in plan["versions"].items())
    compiled = units.in_seconds(plan.get("compile_seconds"))
    _say(console, f"\nCompiled in {compiled}; partitioner {plan.get('partitioner')}; {versions}")
    for note in plan.get("notes") or []:
        _say(console, f"Note: {note}")


def print_diff(changes: Sequence[Change], console: rich.console.Console) -> None:
    """Prints what changed between two plans, section by section."""
    if not changes:
        _say(console, "Nothing changed.")
    for index, (section, group) in enumerate(itertools.groupby(changes, lambda c: c.section)):
        if index:
            _say(console, "")
        table = _table(section, right=("before", "after", "ratio"), no_wrap=False)
        for what, changes_of_it in itertools.groupby(group, lambda c: c.what):
            _add_changes(table, what, list(changes_of_it))
        console.print(table, highlight=False)


def _add_changes(table: rich.table.Table, what: str, changes: Sequence[Change]) -> None:
    """One thing's changes: in its own row, or one below the other under its name."""
    if changes[0].field:
        table.add_row(_plain(what))
    for change in changes:
        ratio = f"x{units.digits(change.ratio)}" if change.ratio is not None else ""
        # A note is its own name: it is there or not.
        before, after = (
            "there" if value == what else _value(value, change.unit)
            for value in (change.before, change.after)
        )
        table.add_row(_plain(f"  {change.field}" if change.field else what), before, after, ratio)


def _print_verdict(console: rich.console.Console, plan: Row) -> None:
    memory = plan["bytes_per_device"]
    room = memory["capacity"] - memory["peak"]
    chip = f" {plan['chip']}" if plan.get("chip") else ""
    told = f"{units.in_bytes(abs(room))} {'to spare' if room >= 0 else 'too much'}"
    _say(
        console,
        f"{'It fits' if plan['fits'] else 'It does not fit'}: peak "
        f"{units.in_bytes(memory['peak'])} of {units.in_bytes(memory['capacity'])} per device "
        f"({units.in_share(memory['peak'] / (memory['capacity'] or 1))}), {told}.",
        style="bold green" if plan["fits"] else "bold red",
    )
    _say(
        console,
        f"{plan['name']} on {plan['topology']} ({plan['devices']:,} devices,{chip}), mesh "
        f"{plan['mesh'] or 'none'}, strategy {plan.get('strategy_name') or 'none'}",
    )
    if plan.get("strategy"):
        _say(console, f"  {plan['strategy']}")
    if plan.get("compiler") == "cpu":
        what = "" if plan["topology"].startswith("cpu:") else ", not this chip"
        told = f"Compiled for CPU devices{what}: memory and communication are an estimate."
        _say(console, told)
    if plan.get("seconds_per_step") is not None:
        _say(
            console,
            f"{units.digits(plan['steps_per_second'])} steps/s (estimate), at most "
            f"{units.digits(plan['steps_per_second_bound'])} (bound); "
            f"{units.in_large(plan.get('tokens_per_second'))} tokens/s; "
            f"MFU {units.in_share(plan.get('mfu'))}",
        )


def _print_remedies(console: rich.console.Console, remedies: Sequence[Row]) -> None:
    if not remedies:
        return
    table = _table("tried instead", right=("fits", "peak", "step"))
    for row in remedies:
        table.add_row(
            _plain(row["change"] + (f"\n  {row['reason']}" if row.get("reason") else "")),
            "yes" if row["fits"] else "no",
            units.in_bytes(row.get("peak")),
            units.in_seconds(row.get("seconds_per_step")),
        )
    _print(console, table)


def _print_memory(console: rich.console.Console, memory: Row) -> None:
    table = _table("memory of one device", right=("bytes", "of capacity"))
    table.add_column("", no_wrap=True)
    capacity = memory["capacity"] or 1

    def add(name: str, size: int) -> None:
        share = size / capacity
        bar = "█" * min(round(share * _BAR_WIDTH), _BAR_WIDTH) or ("▏" if size else "")
        table.add_row(name, units.in_bytes(size), units.in_share(share), bar)

    for name in MEMORY_CLASSES:
        add(_CLASS_NAMES.get(name, name), memory[name])
    rest = memory["peak"] - sum(memory[name] for name in MEMORY_CLASSES)
    if rest > 0:
        add("not told apart", rest)
    elif rest < 0:
        table.add_row("held at other moments", f"-{units.in_bytes(-rest)}", "", "")
    table.add_section()
    add("peak", memory["peak"])
    table.add_row("capacity", units.in_bytes(memory["capacity"]), "", "")
    _print(console, table)


def _print_layers_held(console: rich.console.Console, tensors: Sequence[Row]) -> None:
    held: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in tensors:
        held[row.get("layer") or ""][row["kind"]] += row["bytes_per_device"]
    if not held:
        return
    table = _table("weights and moments of a layer", right=("weights", "moments", "per device"))
    rows = sorted(held.items(), key=lambda item: -item[1].total())
    for layer, sizes in rows[:_MOST_ROWS]:
        parts = (sizes["weights"], sizes["moments"], sizes.total())
        table.add_row(_plain(layer or "(no layer)"), *map(units.in_bytes, parts))
    rest = [sizes for _, sizes in rows[_MOST_ROWS:]]
    if rest:
        parts = [sum(sizes[kind] for sizes in rest) for kind in ("weights", "moments")]
        table.add_row(f"and {len(rest)} more", *map(units.in_bytes, (*parts, sum(parts))))
    table.add_section()
    parts = [sum(sizes[kind] for sizes in held.values()) for kind in ("weights", "moments")]
    table.add_row("all", *map(units.in_bytes, (*parts, sum(parts))))
    _print(console, table)


def _print_tensors(console: rich.console.Console, tensors: Sequence[Row]) -> None:
    if not tensors:
        _say(console, "\nThe step keeps no weights or moments.")
        return
    table = _table("tensor", "split", right=("bytes", "per device"))
    rows = sorted(tensors, key=lambda row: -row["bytes_per_device"])
    for row in rows[:_MOST_ROWS]:
        table.add_row(
            _plain(
                f"{row['path']} ({row['kind']})\n  {row.get('layout') or ''} {_shape_text(row)}"
            ),
            _plain(row.get("split") or "whole"),
            units.in_bytes(row["bytes"]),
            units.in_bytes(row["bytes_per_device"]),
        )
    _print(console, table)
    _say_more(console, rows, "bytes_per_device", units.in_bytes)


def _print_temporaries(console: rich.console.Console, rows: Sequence[Row]) -> None:
    if not rows:
        return
    table = _table("largest temporaries", "layer", "shape", right=("bytes",))
    rows = sorted(rows, key=lambda row: -row["bytes"])
    for row in rows[:_MOST_ROWS]:
        cells = (row["name"], row.get("layer") or "", _shape_text(row))
        table.add_row(*map(_plain, cells), units.in_bytes(row["bytes"]))
    _print(console, table)
    _say_more(console, rows, "bytes", units.in_bytes)


def _print_collectives(console: rich.console.Console, collectives: Sequence[Row]) -> None:
    if not collectives:
        _say(console, "\nNo collectives.")
        return
    right = ("one call", "calls", "bound", "estimate", "share")
    table = _table("collective", right=right)
    rows = sorted(collectives, key=lambda row: -(row.get("seconds") or 0))
    for row in rows[:_MOST_ROWS]:
        table.add_row(
            _plain(
                f"{row['kind']} over {row['axis']}, {row.get('dtype')}\n"
                f"  {row.get('layer') or '(no layer)'}, {row.get('phase')}"
            ),
            units.in_bytes(row["bytes"]),
            units.in_count(row["count"]),
            units.in_seconds(row.get("seconds_bound")),
            units.in_seconds(row.get("seconds")),
            units.in_share(row.get("share")),
        )
    table.add_section()
    for (kind, axis), group in _by_kind(rows).items():
        moved = sum(row["bytes"] * row["count"] for row in group)
        table.add_row(
            _plain(f"{kind} over {axis}: {units.in_bytes(moved)} a step"),
            "",
            units.in_count(sum(row["count"] for row in group)),
            *(units.in_seconds(_sum(group, name)) for name in ("seconds_bound", "seconds")),
            units.in_share(_sum(group, "share")),
        )
    _print(console, table)
    _say_more(console, rows, "seconds", units.in_seconds)


def _by_kind(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = collections.defaultdict(list)
    for row in rows:
        groups[row["kind"], str(row["axis"])].append(row)
    return groups


def _print_arithmetic(console: rich.console.Console, flops: Row) -> None:
    table = _table("arithmetic of one device", right=("per step", "of executed"))
    executed = flops.get("executed") or 0
    names = ("useful", "rematerialized", "dispatch", "padding")
    parts = {name: flops.get(name) or 0 for name in names}
    rest = executed - sum(parts.values())
    if rest > executed * 1e-6:
        parts["other"] = rest
    for name, value in parts.items():
        table.add_row(name, units.in_flops(value), units.in_share(value / (executed or 1)))
    table.add_section()
    table.add_row("executed", units.in_flops(executed), "")
    _print(console, table)


def _print_times(console: rich.console.Console, layers: Sequence[Row]) -> None:
    if not layers:
        return
    table = _table(
        "time of a layer", "phase", right=("times", "bound", "estimate", "share", "most")
    )
    total = _sum(layers, "seconds") or 1
    rows = sorted(layers, key=lambda row: -(row.get("seconds") or 0))
    for row in rows[:_MOST_ROWS]:
        table.add_row(
            _plain(row["layer"] or "(no layer)"),
            row["phase"],
            units.in_count(row["times"]),
            units.in_seconds(row["seconds_bound"]),
            units.in_seconds(row["seconds"]),
            units.in_share((row["seconds"] or 0) / total),
            _longest_part(row),
        )
    table.add_section()
    for phase in dict.fromkeys(row["phase"] for row in layers):
        group = [row for row in layers if row["phase"] == phase]
        bound, seconds = (_sum(group, name) for name in ("seconds_bound", "seconds"))
        cells = (units.in_seconds(bound), units.in_seconds(seconds))
        table.add_row("all", phase, "", *cells, units.in_share(seconds / total), "")
    _print(console, table)
    _say_more(console, rows, "seconds", units.in_seconds)


def _longest_part(row: Row) -> str:
    """What a layer's time mostly goes to."""
    names = {"compute": "compute", "memory": "memory", "communication": "network"}
    return names[max(names, key=lambda name: row.get(f"{name}_seconds") or 0)]


def _print_totals(console: rich.console.Console, plan: Row) -> None:
    parameters = plan["parameters"]
    _say(
        console,
        f"\nA step of {units.in_count(plan.get('tokens_per_step'))} tokens takes "
        f"{units.in_seconds(plan.get('seconds_per_step'))} (estimate), at least "
        f"{units.in_seconds(plan.get('seconds_per_step_bound'))} (bound, with all communication "
        "beside the rest).",
    )
    _say(
        console,
        f"The model has {units.in_large(parameters.get('total'))} parameters, "
        f"{units.in_large(parameters.get('active'))} at work per token.",
    )


def _print_budget(console: rich.console.Console, budget: Row | None) -> None:
    if not budget:
        return
    costs = [f"{units.in_large(budget.get('chip_hours'))} chip-hours"]
    if budget.get("kilowatt_hours") is not None:
        costs.append(f"{units.in_large(budget['kilowatt_hours'])} kWh")
    if budget.get("price") is not None:
        costs.append(f"{units.in_large(budget['price'])} {budget.get('currency') or ''}".rstrip())
    _say(console, f"{units.in_large(budget.get('tokens'))} tokens cost {', '.join(costs)}.")
    sources = budget.get("sources") or []
    for source in [sources] if isinstance(sources, (str, dict)) else sources:
        _say(console, f"  {source}")


def _value(value: Any, unit: str) -> str:
    if value is None:
        return "-"
    if unit in _UNITS and units.is_number(value):
        return _UNITS[unit](value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _plain(str(value))


def _shape_text(row: Row) -> str:
    return f"{row.get('dtype')}[{','.join(map(str, row.get('shape') or ()))}]"


def _sum(rows: Sequence[Row], name: str) -> float:
    return sum(row.get(name) or 0 for row in rows)


def _say_more(
    console: rich.console.Console, rows: Sequence[Row], name: str, in_words: Callable[[Any], str]
) -> None:
    rest = rows[_MOST_ROWS:]
    if rest:
        _say(console, f"and {len(rest)} more, {in_words(_sum(rest, name))}; --json has them all")


def _print(console: rich.console.Console, table: rich.table.Table) -> None:
    _say(console, "")
    console.print(table, highlight=False)


def _say(console: rich.console.Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _table(*left: str, right: Sequence[str] = (), no_wrap: bool = True) -> rich.table.Table:
    table = rich.table.Table(
        box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True
    )
    for head in left:
        table.add_column(head, overflow="fold")
    for head in right:
        table.add_column(head, justify="right", no_wrap=no_wrap, overflow="fold")
    return table


def _plain(text: str) -> str:
    """Text in which rich sees no markup: layers[0] is no style."""
    return text.replace("[", r"\[")
