"""Models that a budget is searched over: decoders of one family, from small to large."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

# The family of Ludziejewski et al. 2025 (appendix A, https://arxiv.org/abs/2502.05172), whose
# scaling law counts parameters in this way: layers = heads = model_dim / 64, attention with 4 M^2
# weights in each layer, and experts of three matrices with 9 M^2 weights together.
HEAD_DIM = 64
VOCABULARY = 50_257
_ATTENTION = 4
_EXPERT = 9
_FLOPS_PER_WEIGHT = 6
# Of a router, for each weight (Krajewski et al. 2024, section 6.1).
_FLOPS_PER_ROUTER_WEIGHT = 14
_MOST_LAYERS = 512


@dataclasses.dataclass(frozen=True)
class Experts:
    """How sparse a model is.

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
      experts: the experts.
      layers: number of layers.
      active: weights that a token uses, embeddings included.
      total: all weights.
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
