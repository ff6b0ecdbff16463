"""The table of what is checked of an accelerator, in order.

A new check is one entry: a name, what it needs, and what runs it. A new kernel is an entry of
kernels.py, and a new exchange takes part by itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

from lingvo_gshard.core import Progress
from lingvo_gshard.runtime import standard_error
from lingvo_gshard.tools.diagnosis import speed
from lingvo_gshard.tools.diagnosis.accelerator import exchanges, kernels, layers
from lingvo_gshard.tools.diagnosis.accelerator.trials import Machine
from lingvo_gshard.tools.diagnosis.environment import Check, State

# float32 numbers of a device in a small collective: 1 MiB. The large one is the doctor's own.
_FEW_NUMBERS = 2**18
COLLECTIVES = "collectives"


def _needs_nothing(machine: Machine) -> str:
    del machine
    return ""


@dataclasses.dataclass(frozen=True)
class AcceleratorCheck:
    """A check of an accelerator. `needs` names what is missing for it; "" if nothing is."""

    name: str
    run: Callable[[Machine], Iterable[Check]]
    needs: Callable[[Machine], str] = _needs_nothing


def _lacks_peers(machine: Machine) -> str:
    return "" if machine.count > 1 else "it needs two devices or more, and there is one"


def _check_small_collectives(machine: Machine) -> Iterator[Check]:
    for check in speed.check_collectives(machine, _FEW_NUMBERS):
        # Small collectives wait more than they send: their rate is no finding.
        state = State.OK if check.state == State.WARNING else check.state
        yield dataclasses.replace(check, name=f"{check.name}, 1 MiB", state=state, advice="")


CHECKS: tuple[AcceleratorCheck, ...] = (
    AcceleratorCheck("product", lambda machine: [speed.check_product(machine)]),
    *(
        AcceleratorCheck(name, functools.partial(kernels.check, name, make))
        for name, make in kernels.CASES.items()
    ),
    AcceleratorCheck(COLLECTIVES, speed.check_collectives, _lacks_peers),
    AcceleratorCheck(f"{COLLECTIVES}, 1 MiB", _check_small_collectives, _lacks_peers),
    AcceleratorCheck("sharded step", lambda m: [speed.check_step(m.devices)], _lacks_peers),
    AcceleratorCheck(layers.DENSE, functools.partial(layers.check_layer, layers.DENSE)),
    *(
        AcceleratorCheck(name, functools.partial(exchanges.check_exchange, name), _lacks_peers)
        for name in exchanges.NAMES
    ),
    # XLA's ragged exchange has been seen to end the process: what needs it comes last.
    AcceleratorCheck(exchanges.RAGGED_ROWS, exchanges.check_ragged_rows, _lacks_peers),
    *(
        # One device exchanges nothing, and computes the same with all of them.
        AcceleratorCheck(
            name,
            functools.partial(layers.check_layer, name),
            _lacks_peers if index else _needs_nothing,
        )
        for index, name in enumerate(layers.MIXTURES)
    ),
)


def run_checks(
    machine: Machine, progress: Progress, checks: Sequence[AcceleratorCheck] = CHECKS
) -> Iterator[Check]:
    """Yields what checks find. One that cannot run is skipped by name; one that raises has failed.

    Times of virtual devices are left out: they say nothing of an accelerator.
    """
    progress.begin("checking the accelerator", "checks", len(checks))
    for done, check in enumerate(checks):
        progress.update(done)
        if lacking := check.needs(machine):
            yield Check(check.name, State.SKIPPED, lacking)
            continue
        with progress.within(check.name), standard_error.hide():
            try:
                found = list(check.run(machine))
            except Exception as error:
                first, *_ = str(error).splitlines() or [""]
                found = [Check(check.name, State.FAILURE, f"{type(error).__name__}: {first}")]
        for each in found:
            yield dataclasses.replace(each, timing=None) if machine.is_virtual else each
    progress.update(len(checks))
