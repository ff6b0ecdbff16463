"""Traffic of the exchanges of a dropless dispatch, for each kind of exchange.

What the kinds do, and why GPUs have the default that they have, is in wings/dropless/exchanges.py.
A machine has rates of collectives by kind, bytes and the hosts that a group of devices spans
(machines/efficiencies.py).
"""

from __future__ import annotations

from lingvo_gshard.wings.planning.search.candidates import ExpertRows
from lingvo_gshard.wings.planning.search.costs import Collective

GATHERED, FIXED, RAGGED = "gathered", "fixed", "ragged"

# In groups within a host of GPUs, outputs return by an all-to-all.
_HOST = 8
_FLOAT32 = 4


def possible_exchanges(platform: str, devices: int, rows: ExpertRows) -> tuple[str, ...]:
    """Returns the names of the exchanges to compare in a group of devices; one for CPUs ("").

    Without a bound, `fixed` sends each device all that there can be.
    """
    if rows.exchange:
        return (rows.exchange,)
    if not platform:
        return (FIXED,)
    found = [GATHERED]
    if rows.bound or devices == 1:
        found.append(FIXED)
    # On GPUs nothing may overlap it (see the option's reason in wings/compiler_options), and in
    # groups of more than eight it becomes pairs of sends behind a copy to the host
    # (https://github.com/marin-community/marin/issues/7891).
    if platform != "cuda":
        found.append(RAGGED)
    return tuple(found)


def exchanged(
    name: str, call: Collective, rows: ExpertRows, devices: int, returns: bool, platform: str
) -> Collective:
    """Returns the collective that brings rows to their experts, or outputs back.

    Args:
      call: the all-to-all of exactly the rows under balanced loads.
      returns: whether outputs come back, in place of tokens that are sent.
    """
    if name == GATHERED:
        gathered = call.bytes // rows.choices * devices
        if not returns:
            return Collective("all-gather", call.axes, gathered)
        if devices <= _HOST and platform == "cuda":
            # Outputs of 16 bits go to the devices that add them.
            return Collective("all-to-all", call.axes, gathered)
        # Sums are added in float32.
        return Collective("reduce-scatter", call.axes, gathered * _FLOAT32 // rows.itemsize)
    if name == FIXED:
        sent = min(rows.bound or devices, devices)
        return Collective("all-to-all", call.axes, round(call.bytes * sent))
    return Collective("ragged-all-to-all", call.axes, call.bytes)
