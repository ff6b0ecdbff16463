"""Router and RouterPart: what all routers have in common, and what they are composed of."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Self

from lingvo_gshard.core import Layer, NestedMap, Params, UserError, context, layer_method, tf
from lingvo_gshard.core.layer import check_layer_methods
from lingvo_gshard.layers.moe.routing import Routing


class RouterPart:
    """A part of routers: hyperparameters, weights, and what is computed with them.

    A router declares its parts as class attributes, such as `scores = LinearScores()`. A part has
    no name in Params and in theta: hyperparameters and weights are the router's own. A router
    object has a copy of each declared part, bound to the object.
    """

    router: Router

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        check_layer_methods(cls)

    def bind(self, router: Router) -> Self:
        """Returns a copy of the part that belongs to a router."""
        bound = copy.copy(self)
        bound.router = router
        bound.create()
        return bound

    @property
    def p(self) -> Params:
        """The router's Params."""
        return self.router.p

    @property
    def path(self) -> str:
        """The router's path."""
        return self.router.path

    def define(self, p: Params) -> None:
        """Defines the part's hyperparameters."""

    def create(self) -> None:
        """Checks the hyperparameters and creates the router's weights that the part needs."""

    @property
    def balance_floor(self) -> float | None:
        """The value of the part's balancing loss under even loads; None without such a loss."""
        return None


class Capacity(RouterPart):
    """A limit on the tokens that an expert computes. The router itself chooses the limit.

    Attributes:
      tokens_choose: whether each token chooses its experts, so that its output without a limit
        does not depend on other tokens. The routing is then a `TokenChoiceRouting`.
    """

    tokens_choose: ClassVar[bool] = False
    # Options of some subclasses: the factor in training, and outside of it.
    FACTORS: ClassVar[tuple[str, str]] = ("capacity_factor", "evaluation_capacity_factor")

    @property
    def factor(self) -> float:
        """The capacity factor of the current pass; 1, for an even load, if none is set."""
        in_training, outside = (self.p.get(name) for name in self.FACTORS)
        if not context.current().training and outside:
            return outside
        return in_training or 1.0

    def check_dropless(self) -> None:
        """Raises UserError if the router, or one of its options, limits the load of experts."""
        raise UserError(
            f"{self.path}: {type(self.router).__name__} limits how many tokens an expert "
            "computes, and a dropless dispatch does not; choose another router or another dispatch"
        )

    def check_causal(self) -> None:
        """Raises UserError if full buffers let later tokens displace earlier ones."""


class Router(Layer):
    """Decides which experts compute each token, and with what weight.

    A new router is a subclass in its own file. It is composed of parts:

      scores       score the experts for each token; `scores.LinearScores`
      selection    selects experts by scores; `selection.top_1` or `selection.TopK`
      balance      keeps loads even; `balance_loss.BalanceLoss`
      capacity     limits the tokens of an expert; `capacity.TokenCapacity`

    It declares the parts that it needs, and defines

      fprop                 the routing of a batch, from its parts
      experts_per_token     unless it sets `experts_per_token_option`

    Attributes:
      capacity: the part that limits the load of experts.
      experts_per_token_option: the hyperparameter that says how many experts compute a token; empty
        if the number is fixed.
      is_learned: whether the routing depends on learned weights. Experts of other routers cannot be
        pruned by their load.
      sees_later_tokens: whether a token's routing depends on the tokens after it. A causal decoder
        would then be trained with information that it does not have when it generates text. The
        hyperparameter `allow_causal` accepts this.
    """

    capacity = Capacity()
    experts_per_token_option = ""
    is_learned = False
    needs_token_ids = False
    sees_later_tokens = False

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M; 0 for a router without weights.", minimum=0)
        p.define("num_experts", 0, "Size of E.", minimum=1)
        p.define("is_causal", False, "Whether the layer's tokens must not depend on later ones.")
        p.define("is_dropless", False, "Whether the layer's dispatch computes all tokens.")
        if cls.sees_later_tokens or cls.capacity.tokens_choose:
            p.define(
                "allow_causal",
                False,
                "Whether a causal decoder may use this router, although it sees later tokens.",
            )
        for part in cls._declared_parts().values():
            part.define(p)
        return p

    @classmethod
    def _declared_parts(cls) -> dict[str, RouterPart]:
        """Returns the parts by attribute, base classes first."""
        return {
            name: getattr(cls, name)
            for base in reversed(cls.__mro__)
            for name, value in vars(base).items()
            if isinstance(value, RouterPart)
        }

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        used = self.experts_per_token(self.p)
        if used > self.p.num_experts:
            option = self.experts_per_token_option
            raise UserError(
                f"{path}{'.' if option else ''}{option}: {used:g} experts per token, but "
                f"{path}.num_experts={self.p.num_experts}"
            )
        self.parts = {name: part.bind(self) for name, part in type(self)._declared_parts().items()}
        for name, part in self.parts.items():
            setattr(self, name, part)
        if self.p.is_dropless:
            self.capacity.check_dropless()
        if self.p.is_causal:
            self._check_causal()

    @classmethod
    def experts_per_token(cls, params: Params) -> float:
        """Returns how many experts compute a token; the mean if tokens differ."""
        if not cls.experts_per_token_option:
            raise NotImplementedError(f"{cls.__name__} defines no experts_per_token")
        return params.get(cls.experts_per_token_option)

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        mask_GS: tf.Tensor,
        ids_GS: tf.Tensor | None = None,
    ) -> Routing:
        """Returns the routing of a batch.

        Args:
          x_GSM: the tokens, in G groups of S that are routed independently.
          mask_GS: float32, 0 at padding. Padding is not routed and is excluded from all statistics.
          ids_GS: int32, the tokens' ids; None unless `needs_token_ids`.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no fprop")

    @property
    def balance_floor(self) -> float | None:
        """The value of the loss `auxiliary_loss` under even loads; None without such a loss."""
        floors = (part.balance_floor for part in self.parts.values())
        return next((floor for floor in floors if floor is not None), None)

    def _check_causal(self) -> None:
        """Raises UserError if a causal decoder must not use this router."""
        if self.sees_later_tokens and not self.p.allow_causal:
            raise UserError(
                f"{self.path}: {type(self).__name__} routes a token by the tokens after it, but "
                "the layer has is_causal=True. Choose another router, or set "
                f"{self.path}.allow_causal to train a decoder that cannot generate text the way "
                "it was trained"
            )
        self.capacity.check_causal()
