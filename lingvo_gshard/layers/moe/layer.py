"""The mixture-of-experts layer: a feed-forward layer that selects weights for each token."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from lingvo_gshard.core import context, initializers
from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.layer import MATRIX, Layer, layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.shapes import known_sizes
from lingvo_gshard.layers import feed_forward, token_context
from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.layers.moe.dispatches import GatherDispatch
from lingvo_gshard.layers.moe.exact_experts import MOST_EXPERTS, run_experts
from lingvo_gshard.layers.moe.exchange import Exchange
from lingvo_gshard.layers.moe.experts import Experts
from lingvo_gshard.layers.moe.groups import Groups, warn_of_experts, warn_of_groups
from lingvo_gshard.layers.moe.load_metrics import (
    expert_observations,
    load_metrics,
    watched_sums,
)
from lingvo_gshard.layers.moe.routers import Top2Router
from lingvo_gshard.layers.moe.routers.router import TokenChoiceRouter
from lingvo_gshard.layers.moe.routing import Routing
from lingvo_gshard.layers.products import restore
from lingvo_gshard.sharding import annotate_like, einsum
from lingvo_gshard.sharding.partitioning import current_partitioning

LOCAL_LETTERS = {"k": "choices of a token"}

# Observers get the gate of each expert for each token, [B,L,E], by this name.
TOKEN_GATES = "token_gates"

_COMBINATIONS = ("sum", "learned")


class MixtureOfExperts(Layer):
    """E feed-forward experts and a router (arXiv 2006.16668, section 2.2 and Algorithm 2).

    Tokens are split into groups of S, which are routed independently, each with its own capacity.
    The last group of a batch is padded if necessary. Padding is not sent to experts.

    `shared_hidden_dim` adds a shared expert that computes every token (Dai et al. 2024, arXiv
    2401.06066, section 3.2). Its output is added or, with residual MoE (Rajbhandari et al. 2022,
    arXiv 2201.05596, section 4.1), both outputs are weighted by a learned softmax.
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
            "dispatch",
            GatherDispatch.params(),
            "Params of the dispatch, which sends tokens to experts and combines the outputs.",
        )
        p.define("exchange", Exchange.params(), "Params of the exchange of rows between devices.")
        p.define(
            "shared_hidden_dim",
            0,
            "Hidden size of the shared expert; 0: no shared expert.",
            minimum=0,
        )
        p.define("shared_combination", "sum", "How its output is combined: 'sum' or 'learned'.")
        p.define("is_causal", False, "Whether a token's routing must not depend on later tokens.")
        p.define(
            "has_token_ids", False, "Whether callers provide token ids by token_context.tokens."
        )
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
        self._check_router()
        self.create_child(
            "experts", self._with_sizes("experts", ("model_dim", "hidden_dim", "num_experts"))
        )
        if p.shared_hidden_dim:
            self._create_shared()

    @property
    def has_manual_regions(self) -> bool:
        """Whether the dispatch computes in manual regions on a mesh."""
        return self._dispatch.has_manual_regions

    @classmethod
    def has_capacity_factor(cls, params: Params) -> bool:
        """Returns whether the router's capacity_factor limits the experts' buffers.

        Args:
          params: the layer's Params.
        """
        return params.router.cls.has_capacity_factor and not params.dispatch.cls.is_dropless

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
        """Returns a child's Params with the sizes of this layer.

        Raises:
          UserError: the child's Params have another size.
        """
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

    def _check_router(self) -> None:
        if self.router.needs_token_ids and not self.p.has_token_ids:
            raise UserError(
                f"{self.path}.router: {type(self.router).__name__} routes by token ids, but "
                f"{self.path}.has_token_ids is False; set it, and the ids by token_context.tokens"
            )

    def _create_shared(self) -> None:
        p = self.p
        if p.shared_combination not in _COMBINATIONS:
            raise UserError(
                f"{self.path}.shared_combination: {p.shared_combination!r}. "
                f"{names.nearest(p.shared_combination, _COMBINATIONS)}"
            )
        shared = FeedForward.params().set(
            model_dim=p.model_dim,
            hidden_dim=p.shared_hidden_dim,
            use_bias=p.experts.use_bias,
            **feed_forward.options(p.experts),
        )
        self.create_child("shared", shared)
        if p.shared_combination == "learned":
            init = initializers.fan_in(p.model_dim)
            self.create_variable("w_mix", "M", {"M": p.model_dim}, init, role=MATRIX)

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, mask_BL: tf.Tensor) -> tf.Tensor:
        """Returns [B,L,M]. The routed experts give zero for tokens that no expert keeps.

        Args:
          theta: the weights.
          x_BLM: the tokens.
          mask_BL: 0 at padding.
        """
        batch, length, _ = known_sizes(x_BLM.shape)
        groups = Groups.for_batch(batch, length, self.p.group_size)
        warn_of_groups(groups, self.path)
        warn_of_experts(self.p.num_experts, self.path)
        return self._run_groups(theta, x_BLM, mask_BL, groups)

    @layer_method
    def _run_groups(
        self, theta: NestedMap, x_BLM: tf.Tensor, mask_BL: tf.Tensor, groups: Groups
    ) -> tf.Tensor:
        """Returns `fprop` with these groups of tokens."""
        x_GSM = groups.split(x_BLM)
        mask_GS = groups.split(tf.cast(tf.not_equal(mask_BL, 0), tf.float32))
        with groups.ordered():
            ids_GS = self._token_ids(x_BLM.shape, groups)
            routing = self.router.fprop(theta.router, x_GSM, mask_GS, ids_GS)
        self._report(routing, mask_GS)
        self._report_watched(routing, mask_GS, groups)
        self.observe_named(TOKEN_GATES, lambda: groups.merge(routing.token_gates()))
        with groups.ordered():
            y_GSM = self._dispatch.run(routing, x_GSM, self.experts, theta.experts, self._exchange)
        y_BLM = groups.merge(y_GSM)
        if self.p.shared_hidden_dim:
            y_BLM = self._with_shared(theta, x_BLM, mask_BL, y_BLM)
        return self.observe(y_BLM)

    @layer_method
    def decoding_weights(self, theta: NestedMap) -> NestedMap:
        """Returns the weights for inference, expert by expert if `_runs_exactly`."""
        weights = NestedMap(theta)
        if self.p.shared_hidden_dim:
            weights.shared = self.shared.decoding_weights(theta.shared)
        if not self._runs_exactly():
            weights.experts = self.experts.decoding_weights(theta.experts)
            return weights
        count, specs = self.p.num_experts, self.experts.variable_specs().flatten()
        layouts = [dataclasses.replace(spec, layout=spec.layout[1:]) for spec in specs]
        weights.experts = [
            self.experts.decoding_weights(
                theta.experts.pack(
                    annotate_like(w[i], spec)
                    for w, spec in zip(theta.experts.flatten(), layouts, strict=True)
                ),
                is_one=True,
            )
            for i in range(count)
        ]
        return weights

    @layer_method
    def infer(self, theta: NestedMap, x_BLM: tf.Tensor, mask_BL: tf.Tensor) -> tf.Tensor:
        """Returns `fprop` for inference: experts compute every token sent to them.

        A token has the experts and gates that it would have in `fprop` without capacity. So if
        tokens choose their experts, a token's output does not depend on other tokens. If experts
        choose tokens, they choose among all tokens given, as in `fprop`.

        Args:
          theta: `decoding_weights` of this layer.
          x_BLM: the tokens.
          mask_BL: 0 at padding.
        """
        with token_context.override(keeps_all=True):
            batch, length, model_dim = known_sizes(x_BLM.shape)
            if not self._runs_exactly():
                size = self._inference_group_size(batch * length)
                groups = Groups.for_batch(batch, length, size)
                theta = NestedMap(theta, experts=restore(theta.experts))
                return self._run_groups(theta, x_BLM, mask_BL, groups)
            groups = Groups.for_batch(batch, length, batch * length)
            mask_GS = groups.split(tf.cast(tf.not_equal(mask_BL, 0), tf.float32))
            x_GSM, ids_GS = groups.split(x_BLM), self._token_ids(x_BLM.shape, groups)
            routing = self.router.fprop(theta.router, x_GSM, mask_GS, ids_GS)
        self.observe_named(TOKEN_GATES, lambda: groups.merge(routing.token_gates()))
        choices = [
            (tf.where(a.kept_GS, a.expert_GS, self.p.num_experts)[0], a.gate_GS[0])
            for a in routing.assignments
        ]
        expert_kT, gate_kT = map(tf.stack, zip(*choices, strict=True))
        y_TM = run_experts(self.experts.compute_one, theta.experts, x_GSM[0], expert_kT, gate_kT)
        y_BLM = tf.reshape(y_TM, [batch, length, model_dim])
        if self.p.shared_hidden_dim:
            y_BLM = self._with_shared(theta, x_BLM, mask_BL, y_BLM)
        return self.observe(y_BLM)

    def _inference_group_size(self, tokens: int) -> int:
        """Returns the size of groups for inference.

        If tokens choose their experts, outputs do not depend on the groups. Then each device gets
        equally many groups, of its own tokens only.
        """
        current, most = current_partitioning(), self.p.group_size
        if current is None or not isinstance(self.router, TokenChoiceRouter):
            return most
        own = math.ceil(tokens / current.parts(current.split("G", path=self.path)[0]))
        return math.ceil(own / math.ceil(own / most))

    def _runs_exactly(self) -> bool:
        """Returns whether `run_experts` can compute this layer for inference.

        It cannot if experts choose tokens, or if a strategy splits experts or tokens over devices.
        """
        current = current_partitioning()
        is_split = current is not None and any(
            current.parts(current.split(letter, path=self.path)[0]) > 1 for letter in "EG"
        )
        is_chosen = isinstance(self.router, TokenChoiceRouter)
        return is_chosen and self.p.num_experts <= MOST_EXPERTS and not is_split

    @layer_method
    def _with_shared(
        self, theta: NestedMap, x_BLM: tf.Tensor, mask_BL: tf.Tensor, y_BLM: tf.Tensor
    ) -> tf.Tensor:
        """Returns the output of the routed experts combined with the shared expert's output."""
        shared_BLM = self.shared.fprop(theta.shared, x_BLM, mask_BL)
        if self.p.shared_combination == "sum":
            return y_BLM + shared_BLM
        x_float, w_mix = tf.cast(x_BLM, tf.float32), tf.cast(theta.w_mix, tf.float32)
        mix_BL = tf.nn.sigmoid(einsum("BLM,M->BL", x_float, w_mix))
        mix_BL1 = tf.cast(mix_BL, x_BLM.dtype)[..., None]
        return y_BLM * mix_BL1 + shared_BLM * (1.0 - mix_BL1)

    def flops(self, shape: TokenShape) -> int:
        """Returns the operations of the router, the shared expert and the experts of each token."""
        used = self.router.experts_per_token(self.router.p)
        shared = self.shared.flops(shape) if self.p.shared_hidden_dim else 0
        return self.router.flops(shape) + shared + round(used * self.experts.flops(shape))

    def active_parameters(self) -> int:
        """Returns the number of weights that compute one token, with only the experts it uses."""
        used = self.router.experts_per_token(self.router.p) / self.p.num_experts
        experts = self.experts.active_parameters()
        return super().active_parameters() - experts + round(used * experts)

    def _token_ids(self, shape_BLM: tf.TensorShape, groups: Groups) -> tf.Tensor | None:
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

    def _report(self, routing: Routing, mask_GS: tf.Tensor) -> None:
        tokens = tf.reduce_sum(mask_GS)
        for name, loss in routing.losses.items():
            self.add_loss(name, loss.value * loss.weight)
            self.add_metric(name, loss.value, tokens)
        for name, value in routing.metrics.items():
            self.add_metric(name, value, tokens)
        for name, (value, weight) in load_metrics(routing, mask_GS).items():
            self.add_metric(name, value, weight)
        for name, compute in expert_observations(routing, mask_GS).items():
            self.observe_named(name, compute)

    def _report_watched(self, routing: Routing, mask_GS: tf.Tensor, groups: Groups) -> None:
        """Reports the sums of a watched router, if routers are watched."""
        now = token_context.current()
        if now.watched is None:
            return
        kinds_BL = now.kinds
        kinds_GS = None if kinds_BL is None else groups.split(kinds_BL)
        for name, value in watched_sums(routing, mask_GS, kinds_GS, now.watched, groups).items():
            context.current().add_sum(f"{self.path}/{name}", value)
