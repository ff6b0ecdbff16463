"""Makes settings, facts to report and a page of the checks of an accelerator."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import pathlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from lingvo_gshard.core import VERSION, objects
from lingvo_gshard.runtime import chosen_for, options_in_words
from lingvo_gshard.tools.diagnosis.accelerator import exchanges, layers
from lingvo_gshard.tools.diagnosis.accelerator.trials import Machine
from lingvo_gshard.tools.diagnosis.environment import Check, State, Timing

HEADINGS = ("check", "", "measured", "planned", "share")
# Repeated measurements of one program differ by less than this factor.
_FASTER = 1.1
_SEGMENTS = 16
_PACKAGES = re.compile(
    r"jaxlib|jax(-(cuda|rocm).*)?|tensorflow|libtpu|nvidia-(cudnn|nccl|cublas).*"
)
_DRIVER = pathlib.Path("/proc/driver/nvidia/version")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting of Params or a flag, and why it is advised."""

    setting: str
    why: str


def row(check: Check) -> tuple[str, ...]:
    """Returns a check as a row under `HEADINGS`."""
    timing = check.timing
    if timing is None:
        return check.name, check.state.value, "", "", ""
    planned = timing.shown(timing.planned).partition(" ")[0]
    share = f"{timing.planned / timing.seconds:.0%}" if timing.planned else ""
    return check.name, check.state.value, timing.shown(timing.seconds), planned, share


def settings(found: Sequence[Check], machine: Machine) -> Iterator[Setting]:
    """Yields what to set on this machine by what was found."""
    by_name = {check.name: check for check in found}
    failed = [check.name for check in found if check.state == State.FAILURE]
    attentions = [name for name in failed if name.startswith("attention,")]
    if attentions:
        yield Setting("kernel.use_fused = False", f"{', '.join(attentions)}: wrong on this machine")
    if any(name in failed for name in (layers.DENSE, *layers.MIXTURES)):
        yield Setting("--compile_options=none", "a layer failed: try it without XLA's options")
    options = chosen_for(machine.devices[0])
    if options:
        yield Setting("--compile_options", f"steps have by default {options_in_words(options)}")
    yield from _exchange(by_name)
    packed, segmented = map(
        _seconds, map(by_name.get, ("attention, packed", "attention, packed, most_segments"))
    )
    if packed > _FASTER * segmented > 0:
        why = f"attention takes {segmented * 1e3:.3g} ms and not {packed * 1e3:.3g}"
        yield Setting(f"input.most_segments = {_SEGMENTS}", why)
    plain, narrow = (_rate(by_name.get(name)) for name in ("product", "product, fp8"))
    if plain and narrow > _FASTER * plain:
        why = f"products are {narrow / plain:.2g} times as fast as in {machine.dtype}"
        yield Setting("step.precision = 'fp8'", why)


def _exchange(found: Mapping[str, Check]) -> Iterator[Setting]:
    """Yields which exchange of dropless experts to set: the fastest of those that are right."""
    seconds, wrong = {}, []
    for name, exchange in layers.MIXTURES.items():
        checks = [found.get(each) for each in (name, f"{exchanges.PREFIX}{exchange}")]
        if any(check and check.state == State.FAILURE for check in checks):
            wrong.append(exchange)
        elif all(checks) and (taken := _seconds(found[name])):
            seconds[exchange] = taken
    if not seconds and not wrong:
        return
    each = ", ".join(f"{name} {taken * 1e3:.3g} ms" for name, taken in seconds.items())
    never = f"; never {' or '.join(wrong)}, which failed" if wrong else ""
    best = min(seconds, key=seconds.__getitem__, default="")
    yield Setting(f"dispatch.exchange = {best!r}", f"a step of one layer: {each or 'none'}{never}")


def _timing(check: Check | None) -> Timing | None:
    """Returns the time of a check that found all right; None without one."""
    return check.timing if check and check.state != State.FAILURE else None


def _seconds(check: Check | None) -> float:
    timing = _timing(check)
    return timing.seconds if timing else 0.0


def _rate(check: Check | None) -> float:
    timing = _timing(check)
    return timing.amount / timing.seconds if timing else 0.0


def facts(machine: Machine) -> dict[str, str]:
    """Returns what to report of a machine, by name."""
    first = machine.devices[0]
    packages = sorted(
        f"{each.name} {each.version}"
        for each in importlib.metadata.distributions()
        if each.name and _PACKAGES.fullmatch(each.name)
    )
    limit = (first.memory_stats() or {}).get("bytes_limit")
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "lingvo_gshard": VERSION,
        "packages": ", ".join(packages),
        "devices": f"{machine.count} x {first.device_kind}",
        "topology": machine.topology.name if machine.topology else "none that plans know",
        "compute capability": getattr(first, "compute_capability", ""),
        "memory for programs": f"{limit / 2**30:.1f} GiB each" if limit else "",
        "runtime": " ".join(first.client.platform_version.split()),
        "driver": objects.read_text(_DRIVER).splitlines()[0] if _DRIVER.exists() else "",
        **{name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")},
    }
    return {name: value for name, value in found.items() if value}


def points(found: Iterable[Check]) -> list[str]:
    """Returns what was measured, as files of wings/planning/machines take it."""
    return [check.timing.point for check in found if check.timing and check.timing.point]


def page(found: Sequence[Check], machine: Machine) -> str:
    """Returns the page in Markdown."""
    about = facts(machine)
    lines = [f"# {about['devices']}, checked on {about['date']}", ""]
    lines += [f"- **{name}**: {value}" for name, value in about.items()]
    lines += ["", "## What to set", ""]
    if machine.is_virtual:
        lines.append(VIRTUAL)
    lines += [f"- `{each.setting}`: {each.why}" for each in settings(found, machine)]
    lines += ["", "## What was found", "", _cells((*HEADINGS, "found")), _cells(["---"] * 6)]
    lines += [_cells((*row(check), f"{check.found} {check.advice}".strip())) for check in found]
    lines += [
        "",
        "Planned is what `gshard-plan` assumes, share what was reached of it.",
        "",
        "## What to report",
        "",
        "Send this page with an issue. These lines are for `wings/planning/machines`:",
        "",
        *("```", *points(found), "```", ""),
    ]
    return "\n".join(lines)


VIRTUAL = "These are virtual devices: results are checked, and times say nothing."


def _cells(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
