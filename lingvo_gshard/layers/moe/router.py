"""Router: the interface of all routers, and what those share in which tokens choose experts."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import groups
from lingvo_gshard.layers.moe.places import PRIORITIES, Pick, place
from lingvo_gshard.layers.moe.routing import Routing, SlotRouting, WeightedLoss, expert_capacity

# Where no capacity factor is given: room for a balanced load.
_USUAL_CAPACITY_FACTOR = 1.0


class Router(Layer):
    """Says which experts compute each token, and with what weight.

    is_learned: whether it multiplies tokens with a weight.
    needs_token_ids: whether `fprop` must be given the tokens' ids.
    sees_later_tokens: whether a token's experts depend on tokens after it, which a causal decoder
    cannot have: what it writes would depend on what it has not written yet.
    """

    is_learned = False
    needs_token_ids = False
    sees_later_tokens = False

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.")
        p.define("num_experts", 0, "Size of E.")
        return p

    @classmethod
    def experts_per_token(cls, params: Params) -> float:
        """Returns how many experts compute a token, on average at most."""
        raise NotImplementedError(f"{cls.__name__} defines no experts_per_token")

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        mask_GS: tf.Tensor,
        ids_GS: tf.Tensor | None = None,
    ) -> Routing | SlotRouting:
        """Returns the routing of x; tokens whose float32 mask is 0 go nowhere and count nowhere."""
        raise NotImplementedError(f"{type(self).__name__} defines no fprop")

    def check_choice(self, name: str, valid: Sequence[str]) -> None:
        """Raises ValueError, with the nearest valid value, if a hyperparameter has another one."""
        value = self.p.get(name)
        if value not in valid:
            raise ValueError(f"{self.path}.{name}: {value!r}. {names.nearest(value, valid)}")

    def check_range(self, name: str, least: float, most: float = float("inf")) -> None:
        """Raises ValueError if a hyperparameter is out of its range."""
        value = self.p.get(name)
        if not least <= value <= most:
            upper = f" to {most:g}" if most < float("inf") else " or more"
            raise ValueError(f"{self.path}.{name}: {value}; {least:g}{upper} was expected")


class TokenChoiceRouter(Router):
    """A router in which every token picks experts, which take tokens until their buffers are full.

    A balanced load is S * k / E tokens of a group for k experts per token; the paper's capacity
    2S/E (arXiv 2006.16668, section 2.2) is a capacity factor of 1.

    output_masking_rate is Expert Output Masking (NLLB team 2022, arXiv 2207.04672, section 6.2.2):
    in training that share of the experts' outputs counts for nothing, the others for more.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "capacity_factor",
            0.0,
            "An expert has room for this many times a balanced load of a group; 0: once that load, "
            "or with dropless dispatch all that come.",
        )
        p.define(
            "evaluation_capacity_factor",
            0.0,
            "The factor outside of training; E drops no token; 0: that of training.",
        )
        p.define("minimum_capacity", 1, "An expert has room for at least this many of a group.")
        p.define("priority", "position", "Who is placed first: by 'position', or by 'gate'.")
        p.define(
            "output_masking_rate", 0.0, "Share of experts' outputs that count nothing in training."
        )
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        self.check_choice("priority", PRIORITIES)
        for name in ("capacity_factor", "evaluation_capacity_factor"):
            self.check_range(name, 0)
        self.check_range("minimum_capacity", 1)
        self.check_range("output_masking_rate", 0, 0.99)
        self._unlimited = False
        if self.experts_per_token(self.p) > self.p.num_experts:
            option = f"{path}.k" if "k" in self.p else path
            raise ValueError(
                f"{option}: {self.experts_per_token(self.p):g} experts per token of "
                f"{path}.num_experts={self.p.num_experts}"
            )

    @classmethod
    def experts_per_token(cls, params: Params) -> float:
        """Returns k, which routers of another number do not have."""
        return params.k

    def take_all(self) -> None:
        """Has experts take all that come, as dropless dispatch does.

        Raises ValueError if Params limit what they take.
        """
        for name in ("capacity_factor", "evaluation_capacity_factor"):
            if self.p.get(name):
                raise ValueError(
                    f"{self.path}.{name}={self.p.get(name):g} limits what experts take, and "
                    "dispatch='dropless' does not; leave the one 0 or choose another dispatch"
                )
        self._unlimited = True

    def capacity(self, tokens: int, multiple: int = 1) -> int:
        """Returns C for groups of `tokens` in the pass under way, rounded up to `multiple`."""
        p = self.p
        if self._unlimited:
            return tokens
        factor = p.capacity_factor or _USUAL_CAPACITY_FACTOR
        if not context.current().training and p.evaluation_capacity_factor:
            factor = p.evaluation_capacity_factor
        factor *= self.experts_per_token(p)
        return expert_capacity(tokens, p.num_experts, factor, multiple, p.minimum_capacity)

    def route(
        self,
        picks: Sequence[Pick],
        capacity: int,
        losses: dict[str, WeightedLoss] | None = None,
        metrics: dict[str, tf.Tensor] | None = None,
    ) -> Routing:
        """Returns the routing of tokens that picked their experts, first picks first."""
        p = self.p
        choices = place(self._masked(picks), p.num_experts, capacity, p.priority)
        return Routing(choices, p.num_experts, capacity, losses or {}, metrics or {})

    def _masked(self, picks: Sequence[Pick]) -> list[Pick]:
        """The picks with some gates set to nothing, in training."""
        rate = self.p.output_masking_rate
        if not (rate and context.current().training):
            return list(picks)
        masked = []
        for index, pick in enumerate(picks):
            seed = self.random_seed(f"output_masking_{index}")
            drawn_GS = groups.drawn(pick.gate_GS.shape, seed)
            gate_GS = tf.where(drawn_GS < rate, 0.0, pick.gate_GS / (1.0 - rate))
            masked.append(Pick(pick.expert_GS, gate_GS, pick.wanted_GS, pick.counted_GS))
        return masked
