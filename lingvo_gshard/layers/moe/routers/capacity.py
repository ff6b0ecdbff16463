"""Capacity: how many tokens of a group an expert computes, and which tokens it drops."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_gshard.core import Params, UserError, context, tf
from lingvo_gshard.layers import token_context
from lingvo_gshard.layers.moe import groups, routing
from lingvo_gshard.layers.moe.routers.router import Capacity


class TokenCapacity(Capacity):
    """Gives capacity slots to tokens that chose experts. Full experts drop tokens.

    A balanced load is S * k / E tokens per group with k experts each. The paper's capacity 2S/E
    (arXiv 2006.16668, section 2.2) is a capacity factor of 1.

    `output_masking_rate` is Expert Output Masking (NLLB team 2022, arXiv 2207.04672, section
    6.2.2): in training this fraction of the experts' outputs is masked and the rest is scaled up.
    """

    tokens_choose = True

    def define(self, p: Params) -> None:
        """Defines the size of buffers and the order of tokens; see `RouterPart.define`."""
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
        p.define("minimum_capacity", 1, "Fewest slots of an expert for a group.", minimum=1)
        p.define(
            "priority",
            "position",
            "Which tokens get the slots of a full expert: 'position', the earlier ones, or 'gate', "
            "those with the larger gate.",
            choices=routing.PRIORITIES,
        )
        p.define(
            "order",
            "",
            "Which choices get slots first: 'choice', all first ones before all second ones, as in "
            "the paper; 'token', all of a token before those of later tokens. '' is 'token' in a "
            "causal layer, and 'choice' elsewhere.",
            choices=("", *routing.ORDERS),
        )
        p.define_fraction("output_masking_rate", 0.0, "Share of outputs masked in training.")

    def check_dropless(self) -> None:
        """Raises UserError if a capacity factor is set."""
        for name in self.FACTORS:
            if self.p.get(name):
                raise UserError(
                    f"{self.path}.{name}={self.p.get(name):g} limits how many tokens an expert "
                    "computes, and a dropless dispatch does not; set it to 0 or choose another "
                    "dispatch"
                )

    def check_causal(self) -> None:
        """Raises UserError if these options let later tokens displace earlier ones."""
        if self.p.allow_causal or self.p.is_dropless:
            return
        if self.p.priority == "gate":
            raise UserError(
                f"{self.path}.priority='gate' lets later tokens displace earlier ones, but the "
                f"layer has is_causal=True; set {self.path}.priority='position'"
            )
        if self.order == routing.CHOICE and self.router.experts_per_token(self.p) > 1:
            raise UserError(
                f"{self.path}.order='choice' lets first choices of later tokens displace second "
                f"choices of earlier ones, but the layer has is_causal=True; set "
                f"{self.path}.order='token', or {self.path}.allow_causal to accept it"
            )

    @property
    def order(self) -> str:
        """The choices that get slots first: by default token by token in a causal layer."""
        return self.p.order or (routing.TOKEN if self.p.is_causal else routing.CHOICE)

    def route(
        self,
        choices: Sequence[routing.Choice],
        losses: dict[str, routing.WeightedLoss] | None = None,
        metrics: dict[str, tf.Tensor] | None = None,
        multiple: int = 1,
    ) -> routing.TokenChoiceRouting:
        """Returns the routing of tokens with these choices.

        Args:
          choices: the first choice of every token, then the second, and so on.
          losses: auxiliary losses by name.
          metrics: float32 scalars by name.
          multiple: C is rounded up to a multiple of this number.
        """
        p = self.p
        size = self._size(choices[0].expert_GS.shape[1], multiple)

        def assigned(choices: Sequence[routing.Choice]) -> tuple[routing.Assignment, ...]:
            return routing.assign(choices, p.num_experts, size, p.priority, self.order)

        choices, on_choice = self._mask_outputs(choices), token_context.current().on_choice
        if on_choice:
            assignments = on_choice.assign(self.router, choices, assigned)
        else:
            assignments = assigned(choices)
        return routing.TokenChoiceRouting(
            assignments, p.num_experts, size, losses or {}, metrics or {}
        )

    def _size(self, tokens: int, multiple: int) -> int:
        """Returns C, the capacity slots of an expert for a group of S tokens."""
        p = self.p
        if p.is_dropless or token_context.current().keeps_all:
            return tokens
        factor = self.factor * self.router.experts_per_token(p)
        return routing.expert_capacity(tokens, p.num_experts, factor, multiple, p.minimum_capacity)

    def _mask_outputs(self, choices: Sequence[routing.Choice]) -> list[routing.Choice]:
        """Returns the choices; in training, a random fraction of the gates is set to 0."""
        rate = self.p.output_masking_rate
        if not (rate and context.current().training):
            return list(choices)
        masked = []
        for index, choice in enumerate(choices):
            seed = self.router.random_seed(f"output_masking_{index}")
            drawn_GS = groups.uniform(choice.gate_GS.shape, seed)
            gate_GS = tf.where(drawn_GS < rate, 0.0, choice.gate_GS / (1.0 - rate))
            masked.append(dataclasses.replace(choice, gate_GS=gate_GS))
        return masked
