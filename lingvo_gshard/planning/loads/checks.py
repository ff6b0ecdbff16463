"""Checks that loads are those of the planned model, and that there is room for replicas."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core.config import names
from lingvo_gshard.planning.loads.file import FLAG, Loads
from lingvo_gshard.planning.loads.layers import ExpertLayer


def check_model(loads: Loads, layers: Sequence[ExpertLayer], name: str) -> None:
    """Raises ValueError that names the layer and the counts if loads are of another model.

    Args:
      loads: the loads.
      layers: the layers with experts of the planned step.
      name: name of the planned experiment.
    """
    where = f"{FLAG}={loads.path}"
    if not layers:
        raise ValueError(f"{where}: {name} has no layer with experts")
    counts = f"{name} has {_count(len(layers), 'layer')} with experts, the file {len(loads.layers)}"
    planned = {layer.path: layer for layer in layers}
    for path in loads.layers:
        if path not in planned:
            raise ValueError(
                f"{where} has loads of {path}, which is no layer with experts of {name}. "
                f"{names.nearest(path, planned)} {counts}: are they of another model?"
            )
    for path, layer in planned.items():
        if path not in loads.layers:
            raise ValueError(
                f"{where} has no loads of {path}. {counts}: are they of another model?"
            )
        _check_layer(where, loads, layer, name)


def check_replicas(replicas: int, layers: Sequence[ExpertLayer]) -> None:
    """Raises ValueError if an expert would have more copies than there are devices."""
    for layer in layers:
        parts, experts = layer.devices.parts, layer.num_experts
        if replicas > experts * (parts - 1):
            raise ValueError(
                f"--replicas={replicas}: the {experts:,} experts of {layer.path} are divided over "
                f"{_count(parts, 'device')}; expected at most {experts * (parts - 1):,}, which is "
                "every expert on every device"
            )


def _check_layer(where: str, loads: Loads, layer: ExpertLayer, name: str) -> None:
    record = loads.layers[layer.path][0]
    if record.num_experts != layer.num_experts:
        raise ValueError(
            f"{where} has loads of {_count(record.num_experts, 'expert')} in {layer.path}, where "
            f"{name} has {layer.num_experts}: expected the loads of the same model"
        )
    if record.experts_per_token not in (0.0, layer.experts_per_token):
        raise ValueError(
            f"{where} has loads of {record.experts_per_token:g} experts per token in {layer.path} "
            f"({record.router}), where {name} has {layer.experts_per_token:g} ({layer.router}): "
            "expected the loads of the same router"
        )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
