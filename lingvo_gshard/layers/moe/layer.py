"""The mixture-of-experts layer: a feed-forward layer whose weights are chosen token by token."""

from __future__ import annotations

import tensorflow as tf
from absl import logging

from lingvo_gshard.core import context, initializers
from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.layers.moe import balance, dispatches
from lingvo_gshard.layers.moe.exchange import Exchange
from lingvo_gshard.layers.moe.experts import Experts
from lingvo_gshard.layers.moe.groups import Groups
from lingvo_gshard.layers.moe.routers import Top2Router
from lingvo_gshard.layers.moe.routing import Routing, SlotRouting
from lingvo_gshard.sharding import einsum
from lingvo_gshard.sharding.partitioning import current_partitioning

_COMBINATIONS = ("sum", "learned")


class MixtureOfExperts(Layer):
    """E feed-forward experts and a router (arXiv 2006.16668, section 2.2 and Algorithm 2).

    Tokens are cut into groups of S that are routed apart, each with its own capacity. A batch whose
    tokens do not fill the last group is padded; the padding is routed nowhere.

    Beside the routed experts there may be a shared one, that computes every token (Dai et al. 2024,
    arXiv 2401.06066, section 3.2). Its output is added; or, residual MoE (Rajbhandari et al. 2022,
    arXiv 2201.05596, section 4.1), both are weighted, as a learned softmax says.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.")
        p.define("hidden_dim", 0, "Size of H.")
        p.define("num_experts", 0, "Size of E.")
        p.define("group_size", 1024, "Size of S: tokens that are routed together.")
        p.define("router", Top2Router.params(), "Params of the router.")
        p.define("experts", Experts.params(), "Params of the experts.")
        p.define(
            "dispatch",
            "gather",
            "'gather', 'einsum' as in the paper, or 'dropless', which sets no capacity.",
        )
        p.define(
            "dropless_bound",
            0.0,
            "With dropless dispatch, rows that a device can send to another, times those of even "
            "loads; 0: any number, and none is dropped.",
        )
        p.define("exchange", Exchange.params(), "How rows travel between devices.")
        p.define("shared_hidden_dim", 0, "Hidden size of the shared expert; 0: there is none.")
        p.define("shared_combination", "sum", "How its output joins in: 'sum' or 'learned'.")
        p.define("is_causal", False, "Whether a token must not be routed by what comes after it.")
        p.define("has_token_ids", False, "Whether callers say, by context.tokens, which they are.")
        return p

    @classmethod
    def for_stack(cls, params: Params, is_causal: bool, has_token_ids: bool) -> Params:
        """Returns the Params of this layer in a stack; see `FeedForward.for_stack`."""
        return params.copy().set(is_causal=is_causal, has_token_ids=has_token_ids)

    @classmethod
    def vectorization_obstacle(cls, params: Params) -> str:
        """Returns the option that prevents computing several stages as one operation, or ''."""
        is_dropless = params.dispatch == "dropless"
        return "moe.dispatch='dropless'; choose 'gather' or 'einsum'" if is_dropless else ""

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if p.group_size < 1:
            raise ValueError(f"{path}.group_size: {p.group_size}; a positive size was expected")
        dispatch = dispatches.get(p.dispatch, path)
        dispatch.check(p, path)
        self._exchange = p.exchange.instantiate(path=f"{path}.exchange")
        self.create_child("router", self._with_sizes("router"))
        self._check_router()
        if dispatch.takes_all:
            self.router.take_all()
        self.create_child("experts", self._with_sizes("experts"))
        if p.shared_hidden_dim:
            self._create_shared()

    def _with_sizes(self, name: str) -> Params:
        """A child's Params with the sizes of this layer; ValueError where it has others."""
        p = self.p
        child = p.get(name).copy()
        for size in ("model_dim", "hidden_dim", "num_experts"):
            if size not in child:
                continue
            if child.get(size) not in (0, p.get(size)):
                raise ValueError(
                    f"{self.path}.{name}.{size}: {child.get(size)}, but {self.path}.{size} is "
                    f"{p.get(size)}; leave the {name}'s 0"
                )
            child.set(**{size: p.get(size)})
        return child

    def _check_router(self) -> None:
        p, router = self.p, self.router
        kind = type(router).__name__
        if router.sees_later_tokens and p.is_causal and not router.p.allow_causal:
            raise ValueError(
                f"{self.path}.router: {kind} routes a token by those after it, and "
                f"{self.path}.is_causal says that it must not be; choose another router, or set "
                f"{self.path}.router.allow_causal to train a decoder that cannot decode as it "
                "was trained"
            )
        if p.is_causal and "priority" in router.p and router.p.priority == "gate":
            raise ValueError(
                f"{self.path}.router.priority='gate' has later tokens push out earlier ones, and "
                f"{self.path}.is_causal says that they must not; 'position' does not"
            )
        if router.needs_token_ids and not p.has_token_ids:
            raise ValueError(
                f"{self.path}.router: {kind} routes by token ids, and {self.path}.has_token_ids "
                "says that there are none; give them by context.tokens and set it"
            )

    def _create_shared(self) -> None:
        p = self.p
        if p.shared_combination not in _COMBINATIONS:
            raise ValueError(
                f"{self.path}.shared_combination: {p.shared_combination!r}. "
                f"{names.nearest(p.shared_combination, _COMBINATIONS)}"
            )
        shared = FeedForward.params().set(
            model_dim=p.model_dim,
            hidden_dim=p.shared_hidden_dim,
            activation=p.experts.activation,
            use_bias=p.experts.use_bias,
        )
        self.create_child("shared", shared)
        if p.shared_combination == "learned":
            init = initializers.fan_in(p.model_dim)
            self.create_variable("w_mix", "M", {"M": p.model_dim}, init)

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, mask_BL: tf.Tensor) -> tf.Tensor:
        """Returns [B,L,M]; mask is 0 at padding.

        Routed experts give zero to tokens that none of them took.
        """
        groups = Groups.of(*x_BLM.shape[:2], self.p.group_size)
        self._warn_of_uneven_groups(groups)
        x_GSM = groups.cut(x_BLM)
        mask_GS = groups.cut(tf.cast(tf.not_equal(mask_BL, 0), tf.float32))
        with groups.in_use():
            ids_GS = self._token_ids(x_BLM.shape, groups)
            routing = self.router.fprop(theta.router, x_GSM, mask_GS, ids_GS)
        self._report(routing, mask_GS)
        mover = dispatches.make(self.p.dispatch, routing, x_BLM.dtype, self.p.dropless_bound)
        y_GSM = mover.run(x_GSM, self.experts, theta.experts, self._exchange)
        y_BLM = groups.joined(y_GSM)
        if self.p.shared_hidden_dim:
            y_BLM = self._with_shared(theta, x_BLM, mask_BL, y_BLM)
        return self.observe(y_BLM)

    @layer_method
    def _with_shared(
        self, theta: NestedMap, x_BLM: tf.Tensor, mask_BL: tf.Tensor, y_BLM: tf.Tensor
    ) -> tf.Tensor:
        shared_BLM = self.shared.fprop(theta.shared, x_BLM, mask_BL)
        if self.p.shared_combination == "sum":
            return y_BLM + shared_BLM
        x_float, w_mix = tf.cast(x_BLM, tf.float32), tf.cast(theta.w_mix, tf.float32)
        mix_BL = tf.nn.sigmoid(einsum("BLM,M->BL", x_float, w_mix))
        mix_BL1 = tf.cast(mix_BL, x_BLM.dtype)[..., None]
        return y_BLM * mix_BL1 + shared_BLM * (1.0 - mix_BL1)

    def _token_ids(self, shape_BLM: tf.TensorShape, groups: Groups) -> tf.Tensor | None:
        """The ids of the groups' tokens, int32 [G,S]; None where the router needs none."""
        if not self.router.needs_token_ids:
            return None
        ids_BL = context.current().token_ids
        if ids_BL is None or ids_BL.shape != shape_BLM[:2]:
            given = "none" if ids_BL is None else f"those of {ids_BL.shape}"
            raise ValueError(
                f"{self.path}: context.tokens gives {given}; ids of {shape_BLM[:2]} were expected"
            )
        return groups.cut(ids_BL)

    def _warn_of_uneven_groups(self, groups: Groups) -> None:
        """Groups that devices cannot share evenly are padded, and cross them on the way."""
        current = current_partitioning()
        if current is None:
            return
        parts = current.parts(current.split("G", path=self.path)[0])
        if groups.count % parts:
            logging.warning(
                f"{self.path}: {groups.count} groups of tokens over {parts} devices; with a "
                f"group_size that makes a multiple of {parts} groups less is moved and nothing "
                "padded"
            )
        if groups.cross_parts():
            logging.warning(
                f"{self.path}.group_size: groups of {groups.size} tokens cross the devices that "
                f"rows of {groups.length} are split over; with a group_size that divides the part "
                "of one device rows are not gathered"
            )

    def _report(self, routing: Routing | SlotRouting, mask_GS: tf.Tensor) -> None:
        for name, loss in routing.losses.items():
            self.add_loss(name, loss.value * loss.weight)
            self.add_metric(name, loss.value)
        for name, value in {**routing.metrics, **balance.statistics(routing, mask_GS)}.items():
            self.add_metric(name, value)
        for name, compute in balance.by_expert(routing, mask_GS).items():
            self.observe_beside(name, compute)
