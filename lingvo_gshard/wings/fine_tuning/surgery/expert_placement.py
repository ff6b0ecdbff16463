"""Expert placement: changes the order of experts, so that others share a device.

Devices have equal parts of the experts, in their order. A router's weights are put into the same
order, so that the model computes the same function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lingvo_gshard.core import UserError, names
from lingvo_gshard.layers import MixtureOfExperts


def order_of(
    path: str, placement: Sequence[Sequence[int]], layers: Mapping[str, MixtureOfExperts]
) -> np.ndarray:
    """Returns the order of the experts of a layer, by its path, under a placement on devices.

    Raises:
      UserError: the model has no such layer, devices have different numbers of experts, an expert
        is not on exactly one device, or the router needs the present order.
    """
    names.check(path, layers, f"{path} is no layer with experts of the run")
    layer = layers[path]
    order = np.array([expert for experts in placement for expert in experts], int)
    count = layer.p.num_experts
    if sorted(order.tolist()) != list(range(count)):
        raise UserError(
            f"{path}: the placement has {len(order):,} places for the run's {count:,} experts; "
            "expected one for each. A run has no copies of experts: plan without `replicas`"
        )
    if len({len(experts) for experts in placement}) > 1:
        raise UserError(
            f"{path}: the placement divides {count:,} experts over {len(placement):,} devices; "
            "expected the same number on each"
        )
    router = layer.router
    if not router.is_learned:
        raise UserError(
            f"{path}.router: {type(router).__name__} does not learn which experts suit a token, so "
            "that another order of experts would be another model"
        )
    if "expert_groups" in router.p and router.p.expert_groups:
        raise UserError(
            f"{path}.router.expert_groups={router.p.expert_groups} limits tokens to groups of "
            "neighboring experts, so that another order of experts would be another model"
        )
    return order
