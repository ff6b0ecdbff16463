"""Expert pruning: a model with experts becomes one with those alone that some text needs.

After Koishekenov et al. 2022 (arXiv 2212.09811), who find that translation between a few languages
needs a part of a multilingual model's experts, and keep the same number in every layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.checkpoint.arrays import Arrays
from lingvo_gshard.training.monitoring.expert_use import ExpertUse
from lingvo_gshard.training.surgery import conversion
from lingvo_gshard.training.surgery.upcycling import has_experts, stacks
from lingvo_gshard.training.trainer import Trainer

# By what experts are judged.
LOAD, GATE = "load", "gate"
CRITERIA = (LOAD, GATE)


def pruned_task(task: Params, keep: float) -> Params:
    """Returns a task's Params with the share `keep` of every stack's experts, rounded.

    At least as many are kept as a token uses. Raises ValueError naming the path where there are no
    experts, or tokens do not choose them by what was learned.
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep is {keep:g}; more than 0 and at most 1 was expected")
    result = task.copy()
    sparse = {path: stack for path, stack in stacks(result).items() if has_experts(stack)}
    if not sparse:
        raise ValueError("the task has no experts to prune")
    for path, stack in sparse.items():
        moe = stack.moe
        router = moe.router.cls
        if not router.is_learned:
            raise ValueError(
                f"{path}.moe.router: {router.__name__} does not learn which experts suit a token, "
                "so those that are left could not stand in for others"
            )
        used = router.experts_per_token(moe.router.copy().set(num_experts=moe.num_experts))
        moe.num_experts = max(round(keep * moe.num_experts), math.ceil(used))
        if router.has_capacity_factor:
            for name in ("capacity_factor", "evaluation_capacity_factor"):
                moe.router.set(**{name: min(moe.router.get(name), float(moe.num_experts))})
    return result


def chosen(
    task: Params, use: Mapping[str, ExpertUse], criterion: str = LOAD
) -> dict[str, np.ndarray]:
    """Returns the experts to keep of each layer, ascending, as many as the pruned task has.

    task: what `pruned_task` gave. use: by the path of the layer. criterion: 'load', the tokens that
    an expert keeps, or 'gate', the sum of their gates; of equal ones the other decides.
    """
    if criterion not in CRITERIA:
        raise ValueError(f"{criterion!r}: {names.nearest(criterion, CRITERIA)}")
    counts = {path: stack.moe.num_experts for path, stack in stacks(task).items()}
    kept = {}
    for layer, found in use.items():
        count = next(n for path, n in counts.items() if layer.startswith(f"{path}."))
        first, second = found.load, found.gate
        if criterion == GATE:
            first, second = second, first
        # The last key is the first that counts.
        kept[layer] = np.sort(np.lexsort((-second, -first))[:count])
    return kept


def pruned_state(
    whole: Trainer,
    pruned: Trainer,
    theta: Arrays,
    moments: Arrays,
    kept: Mapping[str, np.ndarray],
) -> NestedMap:
    """Returns the state, its `theta` and `moments`, of the pruned model.

    kept: the experts that are left of each layer, by its path. Moments are those of the experts
    that are left; of shapes that no longer fit they begin anew.
    """
    specs = whole.state_specs()
    weights = conversion.by_name(specs.theta, theta)
    moments = conversion.by_name(specs.moments, moments)

    def taken(array: np.ndarray, name: str, layout: str) -> np.ndarray:
        layer = next((path for path in kept if name.startswith(f"{path}.")), None)
        has_experts = layer is not None and "E" in layout
        return np.take(array, kept[layer], layout.index("E")) if has_experts else array

    def find(name: str, layout: str, shape: tuple[int, ...]) -> np.ndarray:
        array = taken(weights[name], name, layout)
        if tuple(array.shape) != tuple(shape):
            raise ValueError(f"{name}: {list(array.shape)} is left, the model has {list(shape)}")
        return array

    def find_moment(name: str, layout: str, shape: tuple[int, ...]) -> np.ndarray | None:
        if name not in moments:
            return None
        array = taken(moments[name], name, layout) if len(layout) == moments[name].ndim else None
        return array if array is not None and tuple(array.shape) == tuple(shape) else None

    return conversion.of_trainer(pruned, find, find_moment)
