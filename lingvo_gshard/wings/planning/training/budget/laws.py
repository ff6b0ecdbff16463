"""Published scaling laws for mixtures of experts, and the family of models that they rate.

Losses of different laws do not compare, because each was fitted to another text and tokenizer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from lingvo_gshard.core import names

# The family of Ludziejewski et al. 2025 (appendix A, https://arxiv.org/abs/2502.05172), whose
# scaling law counts parameters in this way: layers = heads = model_dim / 64, attention with 4 M^2
# weights in each layer, and experts of three matrices with 9 M^2 weights together.
HEAD_DIM = 64
VOCABULARY = 50_257
_ATTENTION = 4
_EXPERT = 9
_FLOPS_PER_WEIGHT = 6
# FLOPs of a router for each of its weights (Krajewski et al. 2024, section 6.1).
_FLOPS_PER_ROUTER_WEIGHT = 14
_MOST_LAYERS = 512


@dataclasses.dataclass(frozen=True)
class Experts:
    """The sparsity of a model.

    Attributes:
      expansion: weights of all experts, as a multiple of those that a token uses; 1 is dense.
      granularity: experts that a token uses. Each has 1/granularity of a dense layer's weights.
    """

    expansion: int
    granularity: int = 1

    def __str__(self) -> str:
        if self.expansion == 1:
            return "dense"
        return f"{self.granularity} of {self.expansion * self.granularity} experts"


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Models of all sizes with the same experts; each array has one number for each size.

    Attributes:
      active: weights that a token uses, embeddings included.
      inner: weights that a token uses, without embeddings.
      inner_total: all weights without embeddings.
      flops: FLOPs of training on a token.
    """

    experts: Experts
    layers: np.ndarray
    active: np.ndarray
    total: np.ndarray
    inner: np.ndarray
    inner_total: np.ndarray
    flops: np.ndarray


@functools.cache
def shapes(experts: Experts) -> Shapes:
    """Returns the models of all sizes with such experts."""
    layers = np.arange(4, _MOST_LAYERS + 1, dtype=float)
    dim = layers * HEAD_DIM
    embeddings = 2 * dim * VOCABULARY
    inner = (_ATTENTION + _EXPERT) * layers * dim**2
    inner_total = (_ATTENTION + _EXPERT * experts.expansion) * layers * dim**2
    is_sparse = experts.expansion > 1
    routers = layers * dim * experts.expansion * experts.granularity * is_sparse
    active = embeddings + inner
    return Shapes(
        experts,
        layers,
        active,
        embeddings + inner_total,
        inner,
        inner_total,
        _FLOPS_PER_WEIGHT * active + _FLOPS_PER_ROUTER_WEIGHT * routers,
    )


Loss = Callable[[Shapes, np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Law:
    """A scaling law.

    Attributes:
      loss: returns the loss of models, each after its number of tokens.
      experts: the configurations of experts that the law was fitted to.
      most_active: active weights of the largest model that the law was fitted to.
    """

    name: str
    loss: Loss
    experts: tuple[Experts, ...]
    most_active: float
    source: str


def saturating(experts: float, start: float, most: float) -> float:
    """Returns Clark et al.'s transformed number of experts, which saturates (equation 5)."""
    return 1 / (1 / (experts - 1 + 1 / (1 / start - 1 / most)) + 1 / most)


def joint_loss(models: Shapes, tokens: np.ndarray) -> np.ndarray:
    """Returns the loss by the joint law of Ludziejewski et al. 2025 (equation 6 and table 3)."""
    log = np.log(saturating(models.experts.expansion, 2.0732, 290.4521))
    size = 35.91 * np.exp(-0.2285 * log) * models.active ** (-0.1889 + 0.0098 * log)
    data = 35.98 * np.exp(0.5529 * log) * tokens ** (-0.1775 - 0.0259 * log)
    return size + data + 1.3637


def fine_grained_loss(models: Shapes, tokens: np.ndarray) -> np.ndarray:
    """Returns the loss by Krajewski et al. 2024 (equation 9 and table 1)."""
    if models.experts.expansion == 1:
        return 0.47 + 16.3 * models.inner**-0.126 + 26.7 * tokens**-0.127
    size = 18.1 + 2.1 * models.experts.granularity**-0.58
    return 0.47 + size * models.inner_total**-0.115 + 30.8 * tokens**-0.147


def effective_parameters(size: np.ndarray, experts: float) -> np.ndarray:
    """Returns the size of the dense model of equal loss (Clark et al. 2022, S-BASE in table 3).

    The law is log L = a log N + b log E + c log N log E + d in logarithms of base 10, where N are
    the weights that a token uses.
    """
    a, b, c, start, most = -0.082, -0.108, 0.009, 1.847, 314.478
    dense, sparse = (np.log10(saturating(count, start, most)) for count in (1, experts))
    log_size = np.log10(size)
    return 10 ** (((a + c * sparse) * log_size + b * (sparse - dense)) / (a + c * dense))


def routed_loss(models: Shapes, tokens: np.ndarray) -> np.ndarray:
    """Returns Hoffmann et al.'s loss (2022, equation 10) of Clark et al.'s effective parameters."""
    size = effective_parameters(models.active, models.experts.expansion)
    return 1.69 + 406.4 * size**-0.34 + 410.7 * tokens**-0.28


_DENSE = Experts(1)

LAWS = {
    law.name: law
    for law in (
        Law(
            "joint",
            joint_loss,
            tuple(Experts(2**power) for power in range(6)),
            2.7e9,
            "Ludziejewski et al. 2025, Joint MoE Scaling Laws, https://arxiv.org/abs/2502.05172",
        ),
        Law(
            "fine_grained",
            fine_grained_loss,
            (_DENSE, *(Experts(64, 2**power) for power in range(5))),
            3.7e9 * 12 / (4 + 8 * 64),
            "Krajewski et al. 2024, Scaling Laws for Fine-Grained Mixture of Experts, "
            "https://arxiv.org/abs/2402.07871",
        ),
        Law(
            "routed",
            routed_loss,
            tuple(Experts(2**power) for power in range(10)),
            1.3e9,
            "Clark et al. 2022, Unified Scaling Laws for Routed Language Models, "
            "https://arxiv.org/abs/2202.01169, for the worth of experts at 130 billion tokens, and "
            "Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556, for tokens",
        ),
    )
}


def get(name: str, flag: str = "law") -> Law:
    """Returns the law of a name. Raises UserError with the nearest name if there is none."""
    names.check(
        name, LAWS, f"`{flag}={name}`: unknown scaling law; expected one of {', '.join(LAWS)}"
    )
    return LAWS[name]
