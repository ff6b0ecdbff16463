"""What the families with mixtures of experts have in common."""

from __future__ import annotations

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.moe.dispatches import DroplessDispatch
from lingvo_gshard.layers.moe.routers import TopKRouter
from lingvo_gshard.open_models.table import Row, Table


def expert_rows(
    block: str, router: str = "gate", names: tuple[str, str, str] | None = None
) -> Table:
    """Returns the rows of a mixture of experts whose experts are published one by one.

    Args:
      block: published name of the layer within its decoder layer, such as "mlp".
      router: published name of the router.
      names: published names of the gate, of its factor and of the output product.
    """
    gate, factor, out = names or ("gate_proj", "up_proj", "down_proj")
    prefix, ours = f"model.layers.{{layer}}.{block}", "{layer}.feed_forward"
    one = f"{prefix}.experts.{{expert}}"
    return (
        Row(f"{prefix}.{router}.weight", f"{ours}.router.w_gate", "EM->ME"),
        Row(f"{one}.{gate}.weight", f"{ours}.experts.w_in", "HM->MH"),
        Row(f"{one}.{factor}.weight", f"{ours}.experts.w_factor", "HM->MH"),
        Row(f"{one}.{out}.weight", f"{ours}.experts.w_out", "MH->HM"),
    )


def top_k_experts(
    experts: int, k: int, hidden_dim: int, normalize: bool, loss_weight: float
) -> Params:
    """Returns a mixture of SwiGLU experts that drops no token.

    Args:
      experts: number of experts.
      k: experts of a token.
      hidden_dim: size of H of an expert.
      normalize: whether the gates of a token are divided by their sum.
      loss_weight: weight of the load-balancing loss in training.
    """
    moe = MixtureOfExperts.params().set(
        num_experts=experts,
        hidden_dim=hidden_dim,
        router=TopKRouter.params().set(k=k, normalize=normalize, auxiliary_loss_weight=loss_weight),
        dispatch=DroplessDispatch.params(),
    )
    moe.experts.activation = "swiglu"
    return moe
