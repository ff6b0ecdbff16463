"""The options of XLA's compilers that help steps: one table, options.json, with reasons.

Trainings and plans compile steps with the options of the table that are on, and `gshard-inspect
--compiler` lists them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from lingvo_gshard.core import Device, objects
from lingvo_gshard.runtime import Program, compile_options, platform_of

# Groups of options that are on in some programs and off in others.
ALL_TO_ALLS, PARALLEL = "asynchronous all-to-alls", "parallel collectives"
# The most collectives of a GPU that are in flight at the same time.
_OVERLAP_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"

_PLAIN = compile_options.Traits()


@dataclasses.dataclass(frozen=True)
class CompilerOption:
    """An option of a compiler, and what it is for.

    Attributes:
      platform: jax's name of the platform, "tpu" or "cuda".
      name: XLA's name of the option.
      value: the value that serves the purpose.
      reason: what the option does, and why it is on or off.
      source: where the option is documented or used.
      devices: pattern of jax's names of devices, in lower case, that are compiled for with it
        unless `compile_options` says otherwise. "" is every device, and None is none.
      variant: name of a group of options that a search tries together where they are off.
      precision: the value of `step.precision` that the option is for; "" is every value.
      suits_parts: whether the option is also for steps in parts; see `Traits`.
      needs_gathers_ahead: whether the option is only for steps that gather weights ahead.
      if_ragged: the value for steps with ragged exchanges, see `Traits`; "" if they are as others.
    """

    platform: str
    name: str
    value: str
    reason: str
    source: str
    devices: str | None = ""
    variant: str = ""
    precision: str = ""
    suits_parts: bool = True
    needs_gathers_ahead: bool = False
    if_ragged: str = ""

    def is_on(
        self, platform: str, device_kind: str, traits: compile_options.Traits = _PLAIN
    ) -> bool:
        """Returns whether steps for a device are compiled with the option by default.

        Args:
          platform: jax's name of the device's platform.
          device_kind: jax's name of the device, such as "TPU v5 lite".
          traits: the step's; by default it has none.
        """
        if self.platform != platform or self.devices is None:
            return False
        if traits.in_parts and not self.suits_parts:
            return False
        if self.needs_gathers_ahead and not traits.gathers_ahead:
            return False
        if self.precision not in ("", traits.precision):
            return False
        return bool(re.search(self.devices, device_kind.lower()))

    def value_for(
        self, platform: str, device_kind: str, traits: compile_options.Traits = _PLAIN
    ) -> str:
        """Returns the value that steps for a device have by default; "" is XLA's. See `is_on`."""
        if self.platform == platform and traits.is_ragged and self.if_ragged:
            return self.if_ragged
        return self.value if self.is_on(platform, device_kind, traits) else ""


_RAGGED = "https://github.com/marin-community/marin/pull/8081"

OPTIONS = objects.table_beside(__file__, "options.json", tuple[CompilerOption, ...])


@compile_options.COMPILER_OPTIONS.register("table")
def defaults(platform: str, device_kind: str, traits: compile_options.Traits) -> dict[str, str]:
    """Returns the options of the table that are on, by name; for the arguments see `is_on`."""
    values = {each.name: each.value_for(platform, device_kind, traits) for each in OPTIONS}
    return {name: value for name, value in values.items() if value}


def has_parallel_collectives(options: Mapping[str, str]) -> bool:
    """Returns whether a GPU's collectives may be in flight in several streams."""
    return int(options.get(_OVERLAP_LIMIT, 1)) > 1


def option_variants(device: Device, given: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Returns groups of options that steps for a device are compiled without, by name.

    Args:
      device: one of the devices, which need not be in this machine.
      given: `CompileOptions.compile_options`.
    """
    platform, known = platform_of(device), {text.partition("=")[0] for text in given}
    found: dict[str, tuple[str, ...]] = {}
    for each in OPTIONS:
        is_open = each.variant and each.platform == platform and each.name not in known
        if is_open and not each.is_on(platform, device.device_kind):
            options = found.get(each.variant, ())
            found[each.variant] = (*options, f"{each.name}={each.value}")
    return found


def notes_on_ragged_exchanges(
    program: Program, device: Device, options: Mapping[str, str]
) -> list[str]:
    """Returns what users should know about the options of a step with ragged exchanges."""
    platform = platform_of(device)
    if platform != "cuda" or not program.calls(compile_options.RAGGED_EXCHANGE, platform):
        return []
    kept = [
        each.name
        for each in OPTIONS
        if each.if_ragged and options.get(each.name, each.if_ragged) != each.if_ragged
    ]
    if kept:
        return [
            f"`compile_options` keeps {', '.join(kept)}, with which ragged exchanges have computed "
            f"gradients that are not numbers ({_RAGGED}); leave them out"
        ]
    return [
        "nothing overlaps the ragged exchanges of this step, since XLA has computed wrong "
        f"gradients where something did ({_RAGGED}); other exchanges overlap with computation"
    ]
