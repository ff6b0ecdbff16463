"""Base classes of routers: of all routers, of token choice, and of linear logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_gshard.core import context, initializers
from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import token_context
from lingvo_gshard.layers.moe import groups
from lingvo_gshard.layers.moe.load_metrics import gate_entropy
from lingvo_gshard.layers.moe.routers import balance_loss
from lingvo_gshard.layers.moe.routing import (
    CHOICE,
    ORDERS,
    PRIORITIES,
    TOKEN,
    Choice,
    Routing,
    TokenChoiceRouting,
    WeightedLoss,
    assign,
    expert_capacity,
)
from lingvo_gshard.sharding import annotate, einsum


class Router(Layer):
    """Decides which experts compute each token, and with what weight.

    A new router is a subclass in its own file. It must define:

      fprop                 the routing of a batch
      experts_per_token     unless it sets `experts_per_token_option`

    A router overrides the following if the default does not apply:

      flops                 for routers with matrix products
      check_dropless        for routers that can route every token, as dropless dispatch asks
      check_causal          for routers that use later tokens with some options only
      balance_floor         for routers with a load-balancing loss

    `TokenChoiceRouter` is the base class of routers whose tokens choose experts. It applies
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


# Used if no capacity factor is set: capacity for a balanced load.
_DEFAULT_CAPACITY_FACTOR = 1.0


class TokenChoiceRouter(Router):
    """Lets each token choose experts. Experts drop tokens when their slots are full.

    A balanced load is S * k / E tokens per group with k experts each. The paper's capacity 2S/E
    (arXiv 2006.16668, section 2.2) is a capacity factor of 1.

    `output_masking_rate` is Expert Output Masking (NLLB team 2022, arXiv 2207.04672, section
    6.2.2): in training this fraction of the experts' outputs is masked and the rest is scaled up.
    """

    has_capacity_factor = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "capacity_factor",
            0.0,
            "Capacity slots of an expert as a multiple of the even load of a group. 0: that load, "
            "or no limit with dropless dispatch.",
            minimum=0,
        )
        p.define(
            "evaluation_capacity_factor",
            0.0,
            "The factor outside of training. E drops no token; 0 uses the factor of training.",
            minimum=0,
        )
        p.define(
            "minimum_capacity", 1, "Fewest capacity slots of an expert for a group.", minimum=1
        )
        p.define(
            "priority",
            "position",
            "Which tokens get the slots of a full expert: 'position', the earlier ones, or 'gate', "
            "those with the larger gate.",
        )
        p.define(
            "order",
            "",
            "Which choices get slots first: 'choice', all first ones before all second ones, as in "
            "the paper; 'token', all of a token before those of later tokens. '' is 'token' in a "
            "causal layer, and 'choice' elsewhere.",
        )
        if not cls.sees_later_tokens:
            cls.define_allow_causal(p)
        p.define(
            "output_masking_rate",
            0.0,
            "Share of the experts' outputs masked in training.",
            minimum=0,
            below=1,
        )
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        self.check_choice("priority", PRIORITIES)
        self.check_choice("order", ("", *ORDERS))

    @property
    def order(self) -> str:
        """The choices that get slots first: by default token by token in a causal layer."""
        return self.p.order or (TOKEN if self.p.is_causal else CHOICE)

    def check_dropless(self) -> None:
        """Raises UserError if a capacity factor is set."""
        for name in ("capacity_factor", "evaluation_capacity_factor"):
            if self.p.get(name):
                raise UserError(
                    f"{self.path}.{name}={self.p.get(name):g} limits how many tokens an expert "
                    "computes, and a dropless dispatch does not; set it to 0 or choose another "
                    "dispatch"
                )

    def check_causal(self) -> None:
        """Raises UserError if a causal decoder must not use this router with these options."""
        super().check_causal()
        if self.p.allow_causal or self.p.is_dropless:
            return
        if self.p.priority == "gate":
            raise UserError(
                f"{self.path}.priority='gate' lets later tokens displace earlier ones, but the "
                f"layer has is_causal=True; set {self.path}.priority='position'"
            )
        if self.order == CHOICE and self.experts_per_token(self.p) > 1:
            raise UserError(
                f"{self.path}.order='choice' lets first choices of later tokens displace second "
                f"choices of earlier ones, but the layer has is_causal=True; set "
                f"{self.path}.order='token', or {self.path}.allow_causal to accept it"
            )

    def capacity(self, tokens: int, multiple: int = 1) -> int:
        """Returns C, the capacity slots of an expert in the current pass.

        Args:
          tokens: size of S, the tokens of a group.
          multiple: C is rounded up to a multiple of this number.
        """
        p = self.p
        if self.p.is_dropless or token_context.current().keeps_all:
            return tokens
        factor = p.capacity_factor or _DEFAULT_CAPACITY_FACTOR
        if not context.current().training and p.evaluation_capacity_factor:
            factor = p.evaluation_capacity_factor
        factor *= self.experts_per_token(p)
        return expert_capacity(tokens, p.num_experts, factor, multiple, p.minimum_capacity)

    def route(
        self,
        choices: Sequence[Choice],
        capacity: int,
        losses: dict[str, WeightedLoss] | None = None,
        metrics: dict[str, tf.Tensor] | None = None,
    ) -> TokenChoiceRouting:
        """Returns the routing of tokens with these choices.

        Args:
          choices: the first choice of every token, then the second, and so on.
          capacity: size of C, see `capacity`.
          losses: auxiliary losses by name.
          metrics: float32 scalars by name.
        """
        p = self.p
        assignments = assign(
            self._mask_outputs(choices), p.num_experts, capacity, p.priority, self.order
        )
        return TokenChoiceRouting(assignments, p.num_experts, capacity, losses or {}, metrics or {})

    def _mask_outputs(self, choices: Sequence[Choice]) -> list[Choice]:
        """Returns the choices; in training, a random fraction of the gates is set to 0."""
        rate = self.p.output_masking_rate
        if not (rate and context.current().training):
            return list(choices)
        masked = []
        for index, choice in enumerate(choices):
            seed = self.random_seed(f"output_masking_{index}")
            drawn_GS = groups.uniform(choice.gate_GS.shape, seed)
            gate_GS = tf.where(drawn_GS < rate, 0.0, choice.gate_GS / (1.0 - rate))
            masked.append(dataclasses.replace(choice, gate_GS=gate_GS))
        return masked


class LinearRouter(Router):
    """A router whose logits are products of tokens with a weight [M,E].

    `jitter` is described by Fedus et al. 2021 (arXiv 2101.03961, section 2.4). The z-loss is the
    mean over tokens of the squared log-sum-exp of the logits (Zoph et al. 2022, arXiv 2202.08906,
    equation 5).
    """

    is_learned = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "jitter",
            0.0,
            "In training the input is multiplied by 1 - jitter to 1 + jitter.",
            minimum=0,
            maximum=1,
        )
        p.define("use_bias", False, "Whether the logits have a learned bias.")
        p.define("z_loss_weight", 0.0, "Factor of the loss that keeps logits small.", minimum=0)
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        sizes = {"M": p.model_dim, "E": p.num_experts}
        # The paper replicates the router's weight (section 3.2): every group sees every expert.
        init = initializers.fan_in(p.model_dim)
        self.create_variable("w_gate", "ME", sizes, init, unsplit="E")
        if p.use_bias:
            zeros = initializers.constant(0.0)
            self.create_variable("b_gate", "E", {"E": p.num_experts}, zeros, unsplit="E")

    @layer_method
    def logits(self, theta: NestedMap, x_GSM: tf.Tensor) -> tf.Tensor:
        """Returns the logits [G,S,E] in float32."""
        x_float = tf.cast(x_GSM, tf.float32)
        if self.p.jitter and context.current().training:
            drawn = groups.uniform(x_GSM.shape, self.random_seed("jitter"))
            x_float *= 1.0 + self.p.jitter * (2.0 * annotate(drawn, "GSM") - 1.0)
        logits_GSE = einsum("GSM,ME->GSE", x_float, tf.cast(theta.w_gate, tf.float32))
        return logits_GSE + tf.cast(theta.b_gate, tf.float32) if self.p.use_bias else logits_GSE

    def z_loss(self, logits_GSE: tf.Tensor, mask_GS: tf.Tensor) -> dict[str, WeightedLoss]:
        """Returns {"z_loss": loss}, or an empty dict if its weight is 0."""
        if not self.p.z_loss_weight:
            return {}
        # Padding is masked first: its square may overflow, and infinity times 0 is no number.
        real_GSE = tf.where(mask_GS[..., None] > 0, logits_GSE, 0.0)
        squared_GS = tf.square(tf.reduce_logsumexp(real_GSE, -1))
        mean = tf.reduce_sum(squared_GS * mask_GS) / tf.maximum(tf.reduce_sum(mask_GS), 1.0)
        return {"z_loss": WeightedLoss(mean, self.p.z_loss_weight)}

    def flops(self, shape: TokenShape) -> int:
        """Returns the operations of the logits."""
        return 2 * shape.tokens * self.p.model_dim * self.p.num_experts


class LinearTokenChoiceRouter(LinearRouter, TokenChoiceRouter):
    """A token-choice router with linear logits."""


class SoftmaxRouter(LinearTokenChoiceRouter):
    """A router whose gates are a softmax of the logits, balanced by an auxiliary loss."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("auxiliary_loss_weight", 0.01, "Factor k of the load-balancing loss.", minimum=0)
        p.define(
            "auxiliary_loss_level",
            balance_loss.GROUP,
            "Tokens over which the loss balances loads: of a 'group', of a 'batch', or of a moving "
            "average over batches, 'global'.",
        )
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        self.check_choice("auxiliary_loss_level", balance_loss.LEVELS)
        if self.p.auxiliary_loss_level == balance_loss.GLOBAL:
            recent = balance_loss.RecentLoad.params().set(num_experts=self.p.num_experts)
            self.create_child("recent_load", recent)

    @property
    def balance_floor(self) -> float | None:
        """1: each expert has 1/E of the tokens, and the mean gates sum to 1."""
        return 1.0

    @layer_method
    def auxiliary_loss(
        self, theta: NestedMap, gates_GSE: tf.Tensor, counted_GSE: tf.Tensor, mask_GS: tf.Tensor
    ) -> tf.Tensor:
        """Returns the load-balancing loss, unweighted; see `balance_loss.auxiliary_loss`."""
        level = self.p.auxiliary_loss_level
        recent = (self.recent_load, theta.recent_load) if level == balance_loss.GLOBAL else ()
        return balance_loss.auxiliary_loss(gates_GSE, counted_GSE, mask_GS, level, *recent)

    def metrics(self, gates_GSE: tf.Tensor, mask_GS: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the metrics of the gates."""
        return {"router_entropy": gate_entropy(gates_GSE, mask_GS)}
