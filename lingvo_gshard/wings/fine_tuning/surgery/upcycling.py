"""Sparse upcycling: initializes a model with experts from a trained dense model.

Komatsuzaki et al. 2022 (arXiv 2212.05055, section 3). Every expert starts as a copy of the dense
feed-forward layer that it replaces; the router is new. If a token's gates sum to 1 and no token is
dropped, the new model computes the same function as the dense one.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np

from lingvo_gshard.core import Layer, NestedMap, Params, UserError, context, tf
from lingvo_gshard.layers import (
    FeedForward,
    MixtureOfExperts,
    TransformerStack,
    feed_forward,
    inherit,
    is_expert_layer,
    token_context,
)
from lingvo_gshard.training import Arrays, Trainer, arrays
from lingvo_gshard.wings.fine_tuning.surgery import conversion

_FEED_FORWARD, _EXPERTS = ".feed_forward.", ".feed_forward.experts."
_TOLERANCE = 1e-4
_MOST_PROBED = 1024


def stacks(task: Params) -> dict[str, Params]:
    """Returns the Params of a task's stacks by their paths."""
    return {path: node for path, node in task.nodes() if node.cls is TransformerStack}


def has_experts(stack: Params) -> bool:
    """Returns whether a stack has mixtures of experts."""
    return bool(stack.moe_every) and issubclass(stack.moe.cls, MixtureOfExperts)


def upcycled_task(task: Params, num_experts: int, every: int = 0) -> Params:
    """Returns a task's Params with experts in every `every`-th layer of its dense stacks.

    An expert has the hidden size of the feed-forward layer that it replaces.

    Args:
      every: layers every, 2 * every, ... get experts. 0 uses the stack's `moe_every`, or 2 if that
        is 0.

    Raises:
      UserError: there is no layer to convert, or the layers to convert differ. The message names
        the Params path.
    """
    if num_experts < 2:
        raise UserError(f"num_experts is {num_experts}; 2 or more were expected")
    found = stacks(task)
    dense = [path for path, stack in found.items() if not has_experts(stack)]
    if not dense:
        had = f"all of {', '.join(found)} have experts" if found else "it has no TransformerStack"
        raise UserError(f"the task has no dense layers to convert: {had}")
    result = task.copy()
    converted = [_upcycle(result.get(path), path, num_experts, every) for path in dense]
    if not any(converted):
        layers = ", ".join(f"{path} has {found[path].num_layers}" for path in dense)
        raise UserError(
            f"there are no dense layers to convert: layer {every or 2} and its multiples would get "
            f"experts, but {layers}"
        )
    return result


def _upcycle(stack: Params, path: str, num_experts: int, every: int) -> bool:
    """Adds experts to a stack; returns whether it has enough layers for any."""
    every = every or stack.moe_every or 2
    # The first layers, which never have experts, are not counted and stay dense.
    num_layers = stack.num_layers - stack.dense_first
    replaced = [i for i in range(num_layers) if (i + 1) % every == 0]
    if not replaced:
        return False
    dense = _common_params(stack, replaced, path, every)
    rest = inherit(stack.layer.feed_forward, hidden_dim=stack.hidden_dim)
    for index in set(range(num_layers)) - set(replaced):
        if _feed_forward(stack, index) != rest:
            raise UserError(
                f"{path}: the feed-forward layer of layer {index} is {path}.moe, which differs "
                f"from that of the other layers. With experts in layers {every}, {2 * every}, ... "
                f"it would be lost; keep {path}.moe_every = {stack.moe_every}"
            )
    moe = MixtureOfExperts.params().set(
        num_experts=num_experts, hidden_dim=dense.hidden_dim, dtype=dense.dtype
    )
    moe.experts.set(use_bias=dense.use_bias, **feed_forward.options(dense))
    moe.router.set(
        evaluation_capacity_factor=float(num_experts), auxiliary_loss_weight=0.01 * num_experts**2
    )
    stack.set(moe=moe, moe_every=every)
    return True


def _common_params(stack: Params, replaced: list[int], path: str, every: int) -> Params:
    """Returns the Params of the layers that become experts, which must be equal."""
    first, *rest = (_feed_forward(stack, index) for index in replaced)
    if any(other != first for other in rest):
        raise UserError(
            f"{path}: the feed-forward layers of layers {every}, {2 * every}, ... differ, but "
            f"all experts are alike; keep {path}.moe_every = {stack.moe_every}"
        )
    if first.cls is not FeedForward:
        name = first.cls and first.cls.__name__
        raise UserError(
            f"{path}: its feed-forward layers are {name}; only a FeedForward can be copied "
            "to experts"
        )
    return first


def _feed_forward(stack: Params, index: int) -> Params:
    own = is_expert_layer(stack, index)
    return inherit(stack.moe if own else stack.layer.feed_forward, hidden_dim=stack.hidden_dim)


def upcycled_state(
    dense: Trainer, sparse: Trainer, theta: Arrays, moments: Arrays | None
) -> NestedMap:
    """Returns the training state that the sparse model starts with.

    Args:
      theta: the weights of the dense model by path.
      moments: its optimizer moments by path; None to start all at 0. New weights have new moments.

    Raises:
      UserError: the sparse model has other weights than the dense model, experts and routers. The
        message names them.
    """
    specs = dense.state_specs()
    weights = conversion.by_name(specs.theta, theta)
    moments = conversion.by_name(specs.moments, moments) if moments else {}
    unknown: list[str] = []

    def find(name: str, layout: str, shape: tuple[int, ...]) -> np.ndarray | None:
        del layout
        weight = weights.get(name)
        if _fits(weight, shape):
            return weight
        copied = weights.get(name.replace(_EXPERTS, _FEED_FORWARD))
        if _EXPERTS in name and _fits(copied, shape[1:]):
            return np.repeat(copied[None], shape[0], 0)
        if _EXPERTS in name or _FEED_FORWARD not in name or name in weights:
            unknown.append(f"{name} {list(shape)}")
        return None

    def find_moment(name: str, layout: str, shape: tuple[int, ...]) -> np.ndarray | None:
        del layout
        moment = moments.get(name)
        return moment if _fits(moment, shape) else None

    state = conversion.of_trainer(sparse, find, find_moment)
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise UserError(
            f"the dense model has no weights of the shape of {', '.join(unknown[:5])}{more}"
        )
    return state


def _fits(array: arrays.Array | None, shape: tuple[int, ...]) -> TypeGuard[np.ndarray]:
    return array is not None and tuple(array.shape) == tuple(shape)


def _difference(
    dense: Layer, dense_theta: NestedMap, sparse: Layer, sparse_theta: NestedMap, moe: str
) -> str:
    """Returns why a layer with experts computes another function than the dense layer; '' if not.

    Both run in evaluation on one token, on a group of equal tokens, which all choose the same
    experts, and on a group of random tokens. `moe` is the Params path of the mixture.
    """
    rng = np.random.default_rng(1)
    size = min(sparse.p.group_size, _MOST_PROBED)
    x_BLM = rng.normal(size=(1, size, sparse.p.model_dim)).astype(np.float32)
    gates = (
        "the outputs of a token's experts are not weighted by gates that sum to 1, or "
        f"{moe}.shared_hidden_dim adds another expert"
    )
    drops = (
        f"experts drop tokens in evaluation; {moe}.router.evaluation_capacity_factor = "
        f"{sparse.p.num_experts} drops none"
    )
    one_BLM = x_BLM[:, :1]
    probes = (gates, one_BLM), (drops, np.repeat(one_BLM, size, 1)), (drops, x_BLM)
    for reason, probe in probes:
        mask_BL = tf.ones(probe.shape[:2], tf.int32)
        with context.scope(training=False), token_context.tokens(mask_BL):
            x = tf.constant(probe)
            expected = dense.fprop(_tensors(dense_theta), x, mask_BL).numpy()
            given = sparse.fprop(_tensors(sparse_theta), x, mask_BL).numpy()
        if np.abs(given - expected).max() > _TOLERANCE * np.abs(expected).max():
            return reason
    return ""


def _tensors(theta: NestedMap) -> NestedMap:
    return theta.transform(tf.convert_to_tensor)


def check_same_function(
    dense: Layer, dense_theta: NestedMap, sparse: Layer, sparse_theta: NestedMap
) -> None:
    """Raises UserError, which says why, unless every upcycled layer computes as the dense layer."""
    for path in stacks(dense.p):
        pairs = zip(
            _layers(dense, dense_theta, path), _layers(sparse, sparse_theta, path), strict=True
        )
        for (old, old_theta), (new, new_theta) in pairs:
            if type(new.feed_forward) is type(old.feed_forward):
                continue
            layers = old.feed_forward, old_theta.feed_forward
            layers += new.feed_forward, new_theta.feed_forward
            reason = _difference(*layers, f"{path}.moe")
            if reason:
                raise UserError(f"{path} would compute another function than before: {reason}")


def _layers(task: Layer, theta: NestedMap, path: str) -> list[tuple[Layer, NestedMap]]:
    stack: Any = task
    for name in path.split("."):
        stack, theta = stack.children[name], theta[name]
    return stack.unrolled(theta)
