"""The mixture-of-experts layer: a feed-forward layer that selects weights for each token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core import Layer, NestedMap, Params, UserError, known_sizes, layer_method, tf
from lingvo_gshard.layers import token_context
from lingvo_gshard.layers.moe import load_metrics, shared_expert
from lingvo_gshard.layers.moe.dispatches import GatherDispatch
from lingvo_gshard.layers.moe.exchange import Exchange
from lingvo_gshard.layers.moe.experts import Experts
from lingvo_gshard.layers.moe.groups import Groups, warn_of_experts, warn_of_groups
from lingvo_gshard.layers.moe.routers import Top2Router
from lingvo_gshard.layers.moe.routing import Routing, TokenChoiceRouting


class MixtureOfExperts(Layer):
    """E feed-forward experts and a router (arXiv 2006.16668, section 2.2 and Algorithm 2).

    Tokens are split into groups of S, which are routed independently, each with its own capacity.
    The last group of a batch is padded if necessary. Padding is not sent to experts.

    `shared_hidden_dim` adds a shared expert that computes every token; see `shared_expert`.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.", minimum=1)
        p.define("hidden_dim", 0, "Size of H.", minimum=1)
        p.define("num_experts", 0, "Size of E.", minimum=1)
        p.define("group_size", 1024, "Size of S: tokens that are routed together.", minimum=1)
        p.define("router", Top2Router.params(), "Params of the router.")
        p.define("experts", Experts.params(), "Params of the experts.")
        p.define(
            "dispatch", GatherDispatch.params(), "Params of the dispatch of tokens to experts."
        )
        p.define("exchange", Exchange.params(), "Params of the exchange of rows between devices.")
        p.define(
            "gates_inputs",
            False,
            "Whether gates multiply the inputs of experts and not their outputs, as in Llama 4; "
            "with one expert of each token.",
        )
        shared_expert.define(p)
        p.define("is_causal", False, "Whether a token's routing must not depend on later tokens.")
        p.define("has_token_ids", False, "Whether callers give token ids by token_context.tokens.")
        return p

    @classmethod
    def for_stack(cls, params: Params, is_causal: bool, has_token_ids: bool) -> Params:
        """Returns the Params of this layer in a stack; see `Layer.for_stack`."""
        return params.copy().set(is_causal=is_causal, has_token_ids=has_token_ids)

    @classmethod
    def vectorization_obstacle(cls, params: Params) -> str:
        """Returns the option that prevents vectorization; see `Layer`."""
        dispatch = params.dispatch.cls
        if dispatch.is_vectorizable:
            return ""
        return f"moe.dispatch={dispatch.__name__}; choose GatherDispatch or EinsumDispatch"

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        self._dispatch = self._params_of("dispatch").instantiate(path=f"{path}.dispatch")
        self._dispatch.check_exchange(p.exchange, f"{path}.exchange")
        self._exchange = p.exchange.instantiate(path=f"{path}.exchange")
        router = self._with_sizes("router", ("model_dim", "num_experts"))
        router.set(is_causal=p.is_causal, is_dropless=self._dispatch.is_dropless)
        self.create_child("router", router)
        if self.router.needs_token_ids and not self.p.has_token_ids:
            raise UserError(
                f"{self.path}.router: {type(self.router).__name__} routes by token ids, but "
                f"{self.path}.has_token_ids is False; set it, and the ids by token_context.tokens"
            )
        if p.gates_inputs and self.router.experts_per_token(self.router.p) != 1:
            raise UserError(
                f"{path}.gates_inputs: True with more than one expert of each token; 1 was expected"
            )
        self.create_child(
            "experts", self._with_sizes("experts", ("model_dim", "hidden_dim", "num_experts"))
        )
        if p.shared_hidden_dim:
            shared_expert.create(self)

    @property
    def has_manual_regions(self) -> bool:
        """Whether the dispatch computes in manual regions on a mesh."""
        return self._dispatch.has_manual_regions

    @classmethod
    def has_capacity_factor(cls, params: Params) -> bool:
        """Returns whether the router's capacity_factor limits the experts' buffers."""
        return "capacity_factor" in params.router and not params.dispatch.cls.is_dropless

    def _params_of(self, name: str) -> Params:
        """Returns the Params of one part of the layer; ValueError if the value is not Params."""
        value = self.p.get(name)
        if not isinstance(value, Params):
            raise UserError(
                f"{self.path}.{name}: {value!r} is not Params; give those of a class, such as "
                f"{self.p.default(name).cls.__name__}.params()"
            )
        return value

    def _with_sizes(self, name: str, sizes: Sequence[str]) -> Params:
        """Returns a child's Params with the sizes of this layer."""
        p = self.p
        child = self._params_of(name).copy()
        for size in sizes:
            if child.get(size) not in (0, p.get(size)):
                raise UserError(
                    f"{self.path}.{name}.{size}: {child.get(size)}, but {self.path}.{size} is "
                    f"{p.get(size)}; leave the {name}'s 0"
                )
            child.set(**{size: p.get(size)})
        return child

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, mask_BL: tf.Tensor) -> tf.Tensor:
        """Returns [B,L,M]. The routed experts give zero for tokens that no expert keeps."""
        batch, length, _ = known_sizes(x_BLM.shape)
        groups = Groups.for_batch(batch, length, self.p.group_size)
        warn_of_groups(groups, self.path)
        warn_of_experts(self.p.num_experts, self.path)
        return self.run_groups(theta, x_BLM, mask_BL, groups)

    @layer_method
    def run_groups(
        self, theta: NestedMap, x_BLM: tf.Tensor, mask_BL: tf.Tensor, groups: Groups
    ) -> tf.Tensor:
        """Returns `fprop` with these groups of tokens."""
        x_GSM = groups.split(x_BLM)
        mask_GS = groups.split(tf.cast(tf.not_equal(mask_BL, 0), tf.float32))
        with groups.ordered():
            ids_GS = self.token_ids(x_BLM.shape, groups)
            routing = self.router.fprop(theta.router, x_GSM, mask_GS, ids_GS)
        load_metrics.report(self, routing, mask_GS, groups)
        routing, x_GSM = self.gated(theta, routing, x_GSM)
        with groups.ordered():
            y_GSM = self._dispatch.run(routing, x_GSM, self.experts, theta.experts, self._exchange)
        return self.finish(theta, x_BLM, mask_BL, groups.merge(y_GSM))

    def gated(self, theta: NestedMap, routing: Routing, x_GSM: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """Returns the routing and the tokens, which have the gates if `gates_inputs` says so."""
        if not self.p.gates_inputs:
            return routing, x_GSM
        assert isinstance(routing, TokenChoiceRouting)
        (choice,) = routing.assignments
        ones = dataclasses.replace(choice, gate_GS=tf.cast(choice.kept_GS, tf.float32))
        gates_GS1 = tf.cast(choice.gate_GS, x_GSM.dtype)[..., None]
        return dataclasses.replace(routing, assignments=(ones,)), x_GSM * gates_GS1

    def finish(
        self, theta: NestedMap, x_BLM: tf.Tensor, mask_BL: tf.Tensor, y_BLM: tf.Tensor
    ) -> tf.Tensor:
        """Returns the layer's output, given the output y of the routed experts."""
        if self.p.shared_hidden_dim:
            y_BLM = shared_expert.combine(self, theta, x_BLM, mask_BL, y_BLM)
        return self.observe(y_BLM)

    def token_ids(self, shape_BLM: tf.TensorShape, groups: Groups) -> tf.Tensor | None:
        """Returns the ids of the groups' tokens, int32 [G,S]; None if the router needs none."""
        if not self.router.needs_token_ids:
            return None
        ids_BL = token_context.current().ids
        if ids_BL is None or ids_BL.shape != shape_BLM[:2]:
            given = "none" if ids_BL is None else f"those of {ids_BL.shape}"
            raise UserError(
                f"{self.path}: token_context.tokens gives {given}; ids of {shape_BLM[:2]} were "
                "expected"
            )
        return groups.split(ids_BL)
