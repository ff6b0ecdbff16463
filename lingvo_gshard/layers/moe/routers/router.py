"""The interface of all routers."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe.routing import Routing


class Router(Layer):
    """Decides which experts compute each token, and with what weight.

    A new router is a subclass in its own file. It must define

      fprop                 the routing of a batch
      experts_per_token     unless it sets `experts_per_token_option`

    and it overrides the following if the default does not apply:

      flops                 if it has matrix products
      check_dropless        if it can route every token, as dropless dispatch asks
      check_causal          if only some of its options use later tokens
      balance_floor         if it has a load-balancing loss

    `TokenChoiceRouter` is the base class of routers in which tokens choose experts. It applies
    capacity. `LinearTokenChoiceRouter` and `SoftmaxRouter` add learned logits and a balancing loss.

    Attributes:
      experts_per_token_option: the hyperparameter that says how many experts compute a token; empty
        if the number is fixed.
      is_learned: whether the routing depends on learned weights. Experts of other routers cannot be
        pruned by their load.
      needs_token_ids: whether `fprop` needs the ids of the tokens.
      sees_later_tokens: whether a token's routing depends on the tokens after it. A causal decoder
        would then be trained with information that it does not have when it generates text. The
        base class adds the hyperparameter `allow_causal`, which accepts this.
      has_capacity_factor: whether the hyperparameters `capacity_factor` and
        `evaluation_capacity_factor` set the size of the experts' buffers.
    """

    experts_per_token_option = ""
    is_learned = False
    needs_token_ids = False
    sees_later_tokens = False
    has_capacity_factor = False

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M; 0 for a router without weights.", minimum=0)
        p.define("num_experts", 0, "Size of E.", minimum=1)
        p.define("is_causal", False, "Whether the layer's tokens must not depend on later ones.")
        p.define("is_dropless", False, "Whether the layer's dispatch computes all tokens.")
        if cls.sees_later_tokens:
            cls.define_allow_causal(p)
        return p

    @staticmethod
    def define_allow_causal(p: Params) -> None:
        """Defines `allow_causal`, for routers that see later tokens, or do with some options."""
        p.define(
            "allow_causal",
            False,
            "Whether a causal decoder may use this router, although it sees later tokens.",
        )

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        used = self.experts_per_token(self.p)
        if used > self.p.num_experts:
            option = self.experts_per_token_option
            raise UserError(
                f"{path}{'.' if option else ''}{option}: {used:g} experts per token, but "
                f"{path}.num_experts={self.p.num_experts}"
            )
        if self.p.is_dropless:
            self.check_dropless()
        if self.p.is_causal:
            self.check_causal()

    @classmethod
    def experts_per_token(cls, params: Params) -> float:
        """Returns how many experts compute a token; the mean if tokens differ.

        Args:
          params: the router's Params.
        """
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
          theta: the router's weights.
          x_GSM: the tokens, in G groups of S that are routed independently.
          mask_GS: float32, 0 at padding. Padding is not routed and is excluded from all statistics.
          ids_GS: int32, the tokens' ids; None unless `needs_token_ids`.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no fprop")

    @property
    def balance_floor(self) -> float | None:
        """The value of the loss `auxiliary_loss` under even loads; None without such a loss."""
        return None

    def check_dropless(self) -> None:
        """Raises UserError if the router, or one of its options, limits the load of experts."""
        raise UserError(
            f"{self.path}: {type(self).__name__} limits how many tokens an expert computes, and a "
            "dropless dispatch does not; choose another router or another dispatch"
        )

    def check_causal(self) -> None:
        """Raises UserError if a causal decoder must not use this router."""
        if self.sees_later_tokens and not self.p.allow_causal:
            raise UserError(
                f"{self.path}: {type(self).__name__} routes a token by the tokens after it, but "
                "the layer has is_causal=True. Choose another router, or set "
                f"{self.path}.allow_causal to train a decoder that cannot generate text the way "
                "it was trained"
            )

    def check_choice(self, name: str, valid: Sequence[str]) -> None:
        """Raises ValueError, which suggests the nearest value, if a hyperparameter is invalid."""
        value = self.p.get(name)
        if value not in valid:
            raise UserError(f"{self.path}.{name}: {value!r}. {names.nearest(value, valid)}")
