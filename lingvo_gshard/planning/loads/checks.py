"""Checks that loads are those of the planned model, and that there is room for replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lingvo_gshard.core.config import names
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.planning.loads.file import FLAG, Loads
from lingvo_gshard.planning.loads.layers import ExpertLayer
from lingvo_gshard.training.monitoring.routers.records import RouterRecord


def check_model(loads: Loads, layers: Mapping[str, MixtureOfExperts], name: str) -> None:
    """Raises ValueError that names the layer and the counts if loads are of another model.

    Args:
      loads: the loads.
      layers: the layers with experts of the planned model by path.
      name: name of the planned experiment.
    """
    where = f"{FLAG}={loads.path}"
    if not layers:
        raise UserError(f"{where}: {name} has no layer with experts")
    counts = (
        f"{name} has {_count(len(layers), 'layer')} with experts, the file {len(loads.layers)}: "
        "are they of another model?"
    )
    for path in loads.layers:
        if path not in layers:
            raise UserError(
                f"{where} has loads of {path}, which is no layer with experts of {name}. "
                f"{names.nearest(path, layers)} {counts}"
            )
    for path, layer in layers.items():
        if path not in loads.layers:
            raise UserError(f"{where} has no loads of {path}. {counts}")
        _check_layer(where, loads.layers[path][0], layer, name)


def check_replicas(replicas: int, layers: Sequence[ExpertLayer]) -> None:
    """Raises ValueError if an expert would have more copies than there are devices."""
    for layer in layers:
        parts, experts = layer.devices.parts, layer.num_experts
        if replicas > experts * (parts - 1):
            raise UserError(
                f"--replicas={replicas}: the {experts:,} experts of {layer.path} are divided over "
                f"{_count(parts, 'device')}; expected at most {experts * (parts - 1):,}, which is "
                "every expert on every device"
            )


def _check_layer(where: str, record: RouterRecord, layer: MixtureOfExperts, name: str) -> None:
    experts = layer.p.num_experts
    if record.num_experts != experts:
        raise UserError(
            f"{where} has loads of {_count(record.num_experts, 'expert')} in {record.layer}, where "
            f"{name} has {experts}: expected the loads of the same model"
        )
    each = float(layer.router.experts_per_token(layer.router.p))
    if record.experts_per_token not in (0.0, each):
        raise UserError(
            f"{where} has loads of {record.experts_per_token:g} experts per token in "
            f"{record.layer} ({record.router}), where {name} has {each:g} "
            f"({type(layer.router).__name__}): expected the loads of the same router"
        )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
