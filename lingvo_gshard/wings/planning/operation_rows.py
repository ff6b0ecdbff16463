"""Adds up the timed operations of a compiled step into the rows of a plan.

products              matrix products of experts, feed-forward layers and the softmax
attention             all of attention layers, their projections included
routing and dispatch  routers, and what brings tokens to experts and back
collectives           communication between devices, whichever layer causes it
host transfers        copies between the memories of a device and its host
optimizer             the update of weights and optimizer state
other computation     norms, activations, embeddings, the loss
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_gshard.core import OPTIMIZER_SCOPE, Layer, scope_name
from lingvo_gshard.layers import Attention, Experts, MixtureOfExperts, Router
from lingvo_gshard.wings.hlo.operations import Operation
from lingvo_gshard.wings.planning.plan import plan
from lingvo_gshard.wings.planning.roofline import TimedOperation
from lingvo_gshard.wings.tracing.source_lines import GraphLines

PRODUCTS = "products"
ATTENTION = "attention"
ROUTING = "routing and dispatch"
COLLECTIVES = "collectives"
HOST_TRANSFERS = "host transfers"
OPTIMIZER = "optimizer"
OTHER = "other computation"
KINDS = (PRODUCTS, ATTENTION, ROUTING, COLLECTIVES, HOST_TRANSFERS, OPTIMIZER, OTHER)

# Class of a layer -> the kind of all work in the layer. With None, the operation decides the kind.
_OF_CLASSES = {Attention: ATTENTION, Router: ROUTING, MixtureOfExperts: ROUTING, Experts: None}


def kinds_of_layers(layer: Layer) -> dict[str, str | None]:
    """Returns the name scopes of layers that have a kind of their own, with that kind."""
    return {
        scope_name(each.path): kind
        for each in layer.all_layers()
        for cls, kind in _OF_CLASSES.items()
        if isinstance(each, cls)
    }


def kind_of(operation: Operation, layers: Mapping[str, str | None]) -> str:
    """Returns the kind of an operation, one of `KINDS`. `layers` is {} if they are unknown."""
    if operation.collective:
        return COLLECTIVES
    if operation.host:
        return HOST_TRANSFERS
    if operation.phase == OPTIMIZER_SCOPE:
        return OPTIMIZER
    scopes = operation.layer.split("/")
    for length in range(len(scopes), 0, -1):
        scope = "/".join(scopes[:length])
        if scope in layers:
            if layers[scope]:
                return str(layers[scope])
            break
    if operation.dispatch:
        return ROUTING
    return PRODUCTS if operation.matmul_flops else OTHER


def flop_counts(
    timed: Sequence[TimedOperation],
    useful_flops: int | None,
    devices: int,
    stated_flops: int | None = None,
) -> plan.FlopCounts:
    """Returns the arithmetic of one device in one step.

    Args:
      useful_flops: useful operations of all devices; None if the program is not a training step.
      stated_flops: operations of all devices that a program of unknown use states, if known.
    """
    counts = collections.Counter()
    for operation in (t.operation for t in timed):
        amount = operation.matmul_flops * operation.times
        counts["dispatch" if operation.dispatch else operation.phase] += amount
    # The model's formulas do not have these.
    own = {name: counts[name] for name in ("dispatch", "rematerialized", OPTIMIZER_SCOPE)}
    rest = counts.total() - sum(own.values())
    stated = rest if stated_flops is None else stated_flops // devices
    useful = min(rest, stated) if useful_flops is None else useful_flops // devices
    padding = max(rest - useful, 0)
    return plan.FlopCounts(useful=useful, executed=counts.total(), padding=padding, **own)


def _sums(calls: Sequence[TimedOperation], *fields: str) -> dict[str, Any]:
    return {name: sum(getattr(each, name) for each in calls) for name in fields}


# The fields that the calls of a `CollectiveRow` have in common.
_ALIKE = ("kind", "axis", "layer", "phase", "dtype", "bytes", "line")


def collective_rows(
    timed: Sequence[TimedOperation], lines: GraphLines | None = None
) -> list[plan.CollectiveRow]:
    """Returns a row for the calls that agree in all fields `_ALIKE`, most exposed time first."""
    groups: dict[tuple, list[TimedOperation]] = collections.defaultdict(list)
    for each in timed:
        operation, call = each.operation, each.operation.collective
        if call is not None:
            axis = ",".join(call.axes) or "all"
            kind = call.kind + (plan.ACROSS_SLICES if call.slices > 1 else "")
            line = lines.line(operation.op_name) if lines else ""
            where = operation.layer, operation.phase
            groups[kind, axis, *where, call.dtype, call.bytes, line].append(each)
    total = sum(each.communication_seconds for each in timed)
    rows = []
    for key, calls in groups.items():
        bound = sum(each.communication_seconds for each in calls)
        row = plan.CollectiveRow(
            **dict(zip(_ALIKE, key, strict=True)),
            **_sums(calls, "seconds", "hidden_seconds"),
            count=sum(each.operation.times for each in calls),
            seconds_bound=bound,
            share=bound / total if total else 0.0,
        )
        rows.append(row)
    return sorted(rows, key=lambda row: (-row.seconds, -row.hidden_seconds))


def host_rows(timed: Sequence[TimedOperation]) -> list[plan.HostTransferRow]:
    """Returns a row for each direction, layer and phase, those with the most exposed time first."""
    groups: dict[tuple[bool, str, str], list[TimedOperation]] = collections.defaultdict(list)
    for each in timed:
        operation = each.operation
        if operation.host is not None:
            groups[operation.host.to_host, operation.layer, operation.phase].append(each)
    rows = [
        plan.HostTransferRow(
            to_host=to_host,
            layer=layer,
            phase=phase,
            bytes=sum(
                host.bytes * each.operation.times
                for each in transfers
                if (host := each.operation.host)
            ),
            count=sum(each.operation.times for each in transfers),
            seconds_bound=sum(each.host_seconds for each in transfers),
            **_sums(transfers, "seconds", "hidden_seconds"),
        )
        for (to_host, layer, phase), transfers in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row.seconds, -row.hidden_seconds))


_BOUNDS = ("compute_seconds", "memory_seconds", "communication_seconds", "seconds_bound")


def layer_rows(timed: Sequence[TimedOperation]) -> list[plan.LayerRow]:
    """Returns a row for each layer, phase and loop count, in the order of its first operation."""
    groups: dict[tuple, list[TimedOperation]] = collections.defaultdict(list)
    for each in timed:
        operation = each.operation
        groups[operation.layer, operation.phase, operation.times].append(each)
    return [
        plan.LayerRow(
            layer=layer,
            phase=phase,
            times=times,
            flops=sum(each.operation.matmul_flops * times for each in group),
            bytes=sum(each.operation.bytes * times for each in group),
            **_sums(group, *_BOUNDS, "seconds"),
        )
        for (layer, phase, times), group in groups.items()
    ]


def kind_rows(
    timed: Sequence[TimedOperation], layers: Mapping[str, str | None]
) -> list[plan.WorkKindRow]:
    """Returns a row for each kind of work that the step has, in the order of `KINDS`."""
    groups: dict[str, list[TimedOperation]] = collections.defaultdict(list)
    for each in timed:
        groups[kind_of(each.operation, layers)].append(each)
    return [
        plan.WorkKindRow(
            kind=kind,
            flops=sum(e.operation.matmul_flops * e.operation.times for e in groups[kind]),
            **_sums(groups[kind], "seconds_bound", "seconds"),
        )
        for kind in KINDS
        if kind in groups
    ]
