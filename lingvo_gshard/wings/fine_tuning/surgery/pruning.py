"""Expert pruning: keeps only the experts that are needed for some text.

After Koishekenov et al. 2022 (arXiv 2212.09811): translating between a few languages needs only
part of a multilingual model's experts. As there, every layer keeps the same number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from lingvo_gshard.core import NestedMap, Params, UserError, names
from lingvo_gshard.training import Arrays, Trainer, arrays
from lingvo_gshard.wings.fine_tuning.surgery import conversion
from lingvo_gshard.wings.fine_tuning.surgery.expert_use import ExpertUse
from lingvo_gshard.wings.fine_tuning.surgery.upcycling import has_experts, stacks

# Criteria for the experts to keep.
LOAD, GATE = "load", "gate"
CRITERIA = (LOAD, GATE)


def pruned_task(task: Params, keep: float) -> Params:
    """Returns a task's Params with fewer experts in every stack.

    Args:
      keep: share of the experts to keep. The number is rounded, and is at least the number of
        experts per token.

    Raises:
      UserError: the task has no experts, or a router does not learn which experts suit a token.
        The message names the Params path.
    """
    if not 0 < keep <= 1:
        raise UserError(f"keep is {keep:g}; more than 0 and at most 1 was expected")
    result = task.copy()
    sparse = {path: stack for path, stack in stacks(result).items() if has_experts(stack)}
    if not sparse:
        raise UserError("the task has no experts to prune")
    for path, stack in sparse.items():
        moe = stack.moe
        router = moe.router.cls
        if not router.is_learned:
            raise UserError(
                f"{path}.moe.router: {router.__name__} does not learn which experts suit a token, "
                "so the remaining experts could not replace the others"
            )
        used = router.experts_per_token(moe.router.copy().set(num_experts=moe.num_experts))
        moe.num_experts = max(round(keep * moe.num_experts), math.ceil(used))
        if "capacity_factor" in moe.router:
            for name in ("capacity_factor", "evaluation_capacity_factor"):
                moe.router.set(**{name: min(moe.router.get(name), float(moe.num_experts))})
    return result


def chosen(
    task: Params, use: Mapping[str, ExpertUse], criterion: str = LOAD
) -> dict[str, np.ndarray]:
    """Returns the indices of the experts to keep by the path of their layer, ascending.

    Args:
      task: Params from `pruned_task`.
      use: the measured use of the experts by the path of their layer.
      criterion: 'load', the tokens that an expert keeps, or 'gate', the sum of their gates. The
        other criterion breaks ties.
    """
    names.check(criterion, CRITERIA, f"{criterion!r} is unknown")
    counts = {path: stack.moe.num_experts for path, stack in stacks(task).items()}
    kept = {}
    for layer, found in use.items():
        count = next(n for path, n in counts.items() if layer.startswith(f"{path}."))
        first, second = found.load, found.gate
        if criterion == GATE:
            first, second = second, first
        # np.lexsort sorts by its last key first.
        kept[layer] = np.sort(np.lexsort((-second, -first))[:count])
    return kept


def pruned_state(
    whole: Trainer, pruned: Trainer, theta: Arrays, moments: Arrays, kept: Mapping[str, np.ndarray]
) -> NestedMap:
    """Returns the training state of the pruned model, to continue training with.

    Args:
      whole: the trainer of the model with all experts.
      pruned: the trainer of the pruned model, or the same if experts only change their order.
      theta: the weights of the whole model by path.
      moments: its optimizer moments by path. Moments whose shape no longer fits are new.
      kept: the experts to keep, in their new order, by the path of their layer.
    """
    specs = whole.state_specs()
    weights = conversion.by_name(specs.theta, theta)
    moments = conversion.by_name(specs.moments, moments)

    def keep_experts(array: arrays.Array, name: str, layout: str) -> np.ndarray:
        layer = next((path for path in kept if name.startswith(f"{path}.")), None)
        if layer is None or "E" not in layout:
            return np.asarray(array)
        return np.take(array, kept[layer], layout.index("E"))

    def find(name: str, layout: str, shape: tuple[int, ...]) -> np.ndarray:
        array = keep_experts(weights[name], name, layout)
        if tuple(array.shape) != tuple(shape):
            raise UserError(
                f"{name}: {list(array.shape)} after pruning, but the model has {list(shape)}"
            )
        return array

    def find_moment(name: str, layout: str, shape: tuple[int, ...]) -> np.ndarray | None:
        if name not in moments or len(layout) != moments[name].ndim:
            return None
        array = keep_experts(moments[name], name, layout)
        return array if tuple(array.shape) == tuple(shape) else None

    return conversion.of_trainer(pruned, find, find_moment)
