"""Traffic of the exchanges of a dropless dispatch, for each kind of exchange.

What the kinds do, and why GPUs have the default that they have, is in wings/dropless/exchanges.py.
The time of a collective is the machine's (machines/efficiencies.py), for its kind, its bytes, and
the hosts that its devices span.
"""

from __future__ import annotations

from lingvo_gshard.wings.planning.search.candidates import ExpertRows
from lingvo_gshard.wings.planning.search.costs import Collective

GATHERED, FIXED, RAGGED = "gathered", "fixed", "ragged"

# XLA's ragged exchange on GPUs was measured in one host. In larger groups it becomes pairs of sends
# behind a copy to the host (https://github.com/marin-community/marin/issues/7891), whose rate
# nobody has published.
_MEASURED_RAGGED = 8


def possible_exchanges(platform: str, devices: int, rows: ExpertRows) -> tuple[str, ...]:
    """Returns the names of the exchanges to compare.

    Args:
      platform: one of `platforms.PLATFORMS`; "" if all are to be compared.
      devices: the number of devices of a group.
      rows: what travels. Without a bound, `fixed` sends each device all that there can be.
    """
    if rows.exchange:
        return (rows.exchange,)
    found = [GATHERED]
    if rows.bound or devices == 1:
        found.append(FIXED)
    if platform != "cuda" or devices <= _MEASURED_RAGGED:
        found.append(RAGGED)
    return tuple(found)


def exchanged(
    name: str, call: Collective, rows: ExpertRows, devices: int, returns: bool
) -> Collective:
    """Returns the collective that brings rows to their experts, or outputs back.

    Args:
      name: name of the exchange.
      call: the all-to-all of exactly the rows under balanced loads.
      rows: what travels.
      devices: the number of devices of a group.
      returns: whether outputs come back, in place of tokens that are sent.
    """
    if name == GATHERED:
        kind = "reduce-scatter" if returns else "all-gather"
        return Collective(kind, call.axes, call.bytes // rows.choices * devices)
    if name == FIXED:
        sent = min(rows.bound or devices, devices)
        return Collective("all-to-all", call.axes, round(call.bytes * sent))
    return Collective("ragged-all-to-all", call.axes, call.bytes)
