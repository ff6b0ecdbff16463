"""The common part of the families with mixtures of experts."""

from __future__ import annotations

import math
from typing import Any

from lingvo_gshard.core import Params
from lingvo_gshard.layers import MixtureOfExperts, Router, TopKRouter, is_expert_layer
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.family import Part
from lingvo_gshard.wings.published_layers.routers import GroupLimitedRouter, SigmoidRouter


def loss_weight(coefficient: float, stack: Params, k: int = 1) -> float:
    """Converts a published coefficient of a router loss to the weight of each router's loss here.

    transformers multiplies the coefficient with one loss over the tokens of all layers
    (`load_balancing_loss_func` of models/mixtral/modeling_mixtral.py). Each of a token's k choices
    counts as a whole token, so balanced loads have a loss of k. Here every layer adds a loss of its
    own. A choice counts as 1/k of a token, so balanced loads have a loss of 1.

    Args:
      coefficient: such as `router_aux_loss_coef`.
      stack: Params of the stack: its number of layers, and the layers that have experts.
      k: experts of a token if each choice counts as a whole token in the published loss, else 1.
    """
    return coefficient * k / max(_expert_layers(stack), 1)


def loss_coefficient(weight: float, stack: Params, k: int = 1) -> float:
    """Returns the published coefficient that a weight stands for; see `loss_weight`."""
    # Without the digits that rounding adds.
    return float(f"{weight * max(_expert_layers(stack), 1) / k:.12g}")


def _expert_layers(stack: Params) -> int:
    return sum(is_expert_layer(stack, index) for index in range(stack.num_layers))


def top_k_router(k: int, normalize: bool) -> Params:
    """Returns a router that sends each token to its k best experts.

    `TopKRouter` refuses a single expert whose gate is constant, because its router cannot learn.
    """
    cls = GroupLimitedRouter if k == 1 and normalize else TopKRouter
    return cls.params().set(k=k, normalize=normalize)


def dropless_experts(router: Params, experts: int, hidden_dim: int) -> Params:
    """Returns a mixture of SwiGLU experts that drops no token.

    Args:
      experts: number of experts.
      hidden_dim: size of H of an expert.
    """
    moe = MixtureOfExperts.params().set(
        num_experts=experts,
        hidden_dim=hidden_dim,
        router=router,
        dispatch=DroplessDispatch.params(),
    )
    moe.experts.activation = "swiglu"
    return moe


def experts(
    count: str = "num_experts",
    k: str = "num_experts_per_tok",
    hidden: str = "moe_intermediate_size",
    normalize: str = "",
    coefficient: float = 0.001,
    router: type[Router] = TopKRouter,
) -> Part:
    """Returns the part of layers with experts: all layers, unless `moe_every` says which.

    Args:
      count: the key with the number of experts.
      k: the key with the experts of a token.
      hidden: the key with the size of H of an expert.
      normalize: the key that says whether the gates of a token are divided by their sum. Empty if
        a family has no choice.
      coefficient: what a null of `router_aux_loss_coef` stands for.
      router: class of the router.
    """

    def read(config: PublishedConfig, task: Params) -> None:
        decoder, own = task.decoder, router.params()
        decoder.moe_every = decoder.moe_every or 1
        if "k" in own:
            own.set(k=config.get(k), normalize=config.get(normalize, False) if normalize else True)
        if router is TopKRouter:
            own = top_k_router(own.k, own.normalize)
        # The key is not read by a class whose router has one number of choices.
        config.skip(k)
        published = config.get("router_aux_loss_coef", coefficient)
        of_token = int(router.experts_per_token(own))
        own.auxiliary_loss_weight = loss_weight(published, decoder, of_token)
        decoder.moe = dropless_experts(own, config.get(count), config.get(hidden))

    def values(task: Params) -> dict[str, Any]:
        moe, own = task.decoder.moe, task.decoder.moe.router
        cls: type[Router] = own.cls
        of_token = int(cls.experts_per_token(own))
        return {
            count: moe.num_experts,
            k: of_token,
            hidden: moe.hidden_dim,
            "router_aux_loss_coef": loss_coefficient(
                own.auxiliary_loss_weight, task.decoder, of_token
            ),
            **({normalize: own.normalize} if normalize else {}),
        }

    return Part(read, values)


def _read_gated_shared(config: PublishedConfig, task: Params) -> None:
    size = config.get("shared_expert_intermediate_size")
    task.decoder.moe.set(shared_hidden_dim=size, shared_combination="gated")


# A shared expert whose output has a gate.
GATED_SHARED = Part(
    _read_gated_shared,
    lambda task: {"shared_expert_intermediate_size": task.decoder.moe.shared_hidden_dim},
)
# Mixtral's keys.
LOCAL_EXPERTS = experts("num_local_experts", hidden="intermediate_size")


_DENSE, _SPARSE = "dense", "sparse"


def dense_layers(config: PublishedConfig, dense: int | str, by_type: bool = False) -> int:
    """Returns the number of layers before the first one with experts.

    Args:
      dense: this number, or the key that has it.
      by_type: whether a list of the types of layers precedes the number.
    """
    found = config.get("mlp_layer_types", None, list) if by_type else None
    if found is None:
        return dense if isinstance(dense, int) else config.get(dense, kind=int, least=0)
    layers = config.get("num_hidden_layers")
    first = [*found[:layers], _SPARSE].index(_SPARSE)
    if found[:layers] != _types(first, layers):
        config.expect("mlp_layer_types", _types(first, layers))
    return first


def place_experts(decoder: Params, moe: Params, dense: int) -> None:
    """Gives experts to all layers but the first `dense` ones."""
    has_experts = dense < decoder.num_layers
    decoder.set(dense_first=dense if has_experts else 0, moe_every=int(has_experts), moe=moe)


def _dense_of(decoder: Params) -> int:
    return decoder.dense_first if decoder.moe_every else decoder.num_layers


def _types(dense: int, layers: int) -> list[str]:
    return [_DENSE] * dense + [_SPARSE] * (layers - dense)


def types_config(task: Params) -> dict[str, Any]:
    """Returns the types of layers that `dense_layers` reads, from the Params of a task."""
    return {"mlp_layer_types": _types(_dense_of(task.decoder), task.decoder.num_layers)}


def scaled_experts(
    count: str = "n_routed_experts",
    shared: str = "n_shared_experts",
    scale: str = "routed_scaling_factor",
    normalize: str = "norm_topk_prob",
    dense: int | str = "first_k_dense_replace",
    by_type: bool = False,
    router: type[Router] = SigmoidRouter,
) -> Part:
    """Returns the part of DeepSeek-V3's experts: groups, a scale of gates, and shared experts.

    With its sigmoids, training changes the selection bias as arXiv 2408.15664 does, which balances
    loads.

    Args:
      count: the key with the number of experts.
      shared: the key with the number of shared experts.
      scale: the key with the factor of the gates.
      normalize: the key that says whether the gates of a token are divided by their sum. Empty if
        a family has no choice.
      dense: as in `dense_layers`, like `by_type`.
      router: class of the router.
    """

    def read(config: PublishedConfig, task: Params) -> None:
        own = router.params().set(
            k=config.get("num_experts_per_tok"),
            normalize=config.get(normalize, False) if normalize else True,
            scale=config.get(scale, 1.0, float),
            auxiliary_loss_weight=0.0,
        )
        groups = groups_of_experts(config, own.k, count)
        if groups["expert_groups"] > 1:
            own.set(**groups, scores_per_group=2)
        hidden_dim = config.get("moe_intermediate_size")
        moe = dropless_experts(own, config.get(count), hidden_dim)
        moe.shared_hidden_dim = hidden_dim * config.get(shared, 0)
        place_experts(task.decoder, moe, dense_layers(config, dense, by_type))

    def values(task: Params) -> dict[str, Any]:
        names = dict(n_routed_experts=count, n_shared_experts=shared, routed_scaling_factor=scale)
        names |= {"first_k_dense_replace": dense} if isinstance(dense, str) else {}
        found = {names.get(key, key): value for key, value in scaled_config(task).items()}
        return found | types_config(task) if by_type else found

    return Part(read, values)


def groups_of_experts(config: PublishedConfig, k: int, count: str) -> dict[str, int]:
    """Returns the hyperparameters of a router that chooses groups of experts first.

    Args:
      k: experts of a token, which the chosen groups must have.
      count: the key with the number of experts.
    """
    groups, chosen = (config.get(name, 1, int, 1) for name in ("n_group", "topk_group"))
    experts = config.get(count)
    if experts % groups:
        groups = config.expect("n_group", 1, beside=f"{count}={experts}")
    least = math.ceil(k / max(experts // groups, 1))
    if chosen < least:
        chosen = config.expect("topk_group", least, beside=f"n_group={groups}")
    return dict(expert_groups=groups, groups_per_token=chosen)


def scaled_config(task: Params) -> dict[str, Any]:
    """Returns what `scaled_experts()` reads, from the Params of a task."""
    decoder, moe, router = task.decoder, task.decoder.moe, task.decoder.moe.router
    groups, chosen = (
        router.get(name) if name in router else 0 for name in ("expert_groups", "groups_per_token")
    )
    return {
        "first_k_dense_replace": _dense_of(decoder),
        "n_group": groups or 1,
        "topk_group": chosen or 1,
        "num_experts_per_tok": router.k,
        "norm_topk_prob": router.normalize,
        "routed_scaling_factor": router.scale,
        "moe_intermediate_size": moe.hidden_dim,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_hidden_dim // moe.hidden_dim,
    }
