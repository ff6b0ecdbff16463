"""Recurrence: a layer in place of self-attention whose memory of a text has a constant size."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

from lingvo_gshard.core import (
    SCALE,
    Layer,
    NestedMap,
    Params,
    UserError,
    initializers,
    known_sizes,
    layer_method,
    tf,
)
from lingvo_gshard.layers import AttentionKernel, AttentionMask, DenseKernel, Reach, rotary
from lingvo_gshard.sharding import annotate
from lingvo_gshard.wings.inference.layers import cache_shapes, extend, state_shapes
from lingvo_gshard.wings.inference.layers.cached import CacheView, Visible, check_one_text

LOCAL_LETTERS = {"t": "taps of a convolution, or the tokens that it reads"}


class CausalMixer(Layer):
    """Base class of what stands in a causal stack in place of a self-attention."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.", minimum=1)
        p.define("is_causal", False, "Must be True: states hold only earlier tokens.")
        p.define(
            "kernel", DenseKernel.params(), "Kernel of the attentions that share masks with it."
        )
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        if not self.p.is_causal:
            raise UserError(f"{path}.is_causal: False; {type(self).__name__} needs a causal stack")
        self.kernel: AttentionKernel = self.p.kernel.instantiate(path=f"{path}.kernel")

    @property
    def reach(self) -> Reach:
        """The part of a text that a position reads: all before it."""
        return Reach()

    def mask(self, segments_BL: tf.Tensor | None) -> AttentionMask:
        """Returns the mask of packed rows, as `SelfAttention.mask` does."""
        mask = AttentionMask(segments_BL, is_causal=True)
        return mask if segments_BL is None else self.kernel.prepare(mask)


class Recurrence(CausalMixer, abc.ABC):
    """Base class of layers whose states are changed by each token, and read by it.

    Some products with the input pass a causal convolution over the last tokens, one for each
    channel. While decoding, the cache of a row has its states and the last inputs of these
    convolutions.

    Attributes:
      convolved: name of each product that is convolved -> its letters after "BL".
      state_letters: the letters of the state of a row.
      rule: the module whose `Inputs`, `run_rows` and `run_step` change and read the states.
    """

    convolved: ClassVar[Mapping[str, str]]
    state_letters: ClassVar[str]
    rule: ClassVar[Any]

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("convolution_width", 4, "Tokens that a convolution reads.", minimum=1)
        p.define("chunk_size", 64, "Positions that are computed at once.", minimum=1)
        return p

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, mask: AttentionMask) -> tf.Tensor:
        """Returns [B,L,M]: each position reads what earlier ones of its segment have written.

        Args:
          mask: `self.mask` of the segments of x.
        """
        segments_BL = mask.segments_BL
        if segments_BL is None:
            segments_BL = tf.ones(known_sizes(x_BLM.shape)[:2], tf.int32)
        return self.observe(self.run_rows(theta, x_BLM, segments_BL)[0])

    @abc.abstractmethod
    def project(self, theta: NestedMap, x_BLM: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the products with the input, by name."""

    @abc.abstractmethod
    def inputs(self, theta: NestedMap, parts: Mapping[str, tf.Tensor]) -> Any:
        """Returns what tokens write into the states, and read from them.

        Args:
          parts: the products with the input. Convolutions have given float32 values of some.
        """

    @abc.abstractmethod
    def output(
        self, theta: NestedMap, read: tf.Tensor, parts: Mapping[str, tf.Tensor]
    ) -> tf.Tensor:
        """Returns the layer's output [B,L,M] for what was read from the states."""

    @property
    @abc.abstractmethod
    def sizes(self) -> dict[str, int]:
        """The size of each letter."""

    def sizes_of(self, letters: str) -> tuple[int, ...]:
        """Returns the size of each letter of a layout."""
        return tuple(self.sizes[letter] for letter in letters)

    def create_taps(self) -> None:
        """Creates the weights `w_<product>_taps` of the convolutions.

        They are uniform with the variance 1 / (3 width), as convolutions of PyTorch are.
        """
        width = self.p.convolution_width
        taps = initializers.glorot_uniform(9 * width, 9 * width)
        for name, letters in self.convolved.items():
            self.create_variable(f"w_{name}_taps", f"t{letters}", self.sizes, taps, role=SCALE)

    def activate(self, theta: NestedMap, name: str, total: tf.Tensor) -> tf.Tensor:
        """Returns SiLU of the float32 sums of a convolution."""
        del theta
        return annotate(tf.nn.silu(total), f"BL{self.convolved[name]}")

    @layer_method
    def run_rows(
        self, theta: NestedMap, x_BLM: tf.Tensor, segments_BL: tf.Tensor
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns the output [B,L,M] of whole rows, and the cache that they leave."""
        parts, cache = self._convolved(theta, x_BLM, segments_BL)
        is_first_BL = rotary.is_first_in_segment(segments_BL)
        inputs = self.inputs(theta, parts)
        read, cache.state = self.rule.run_rows(inputs, is_first_BL, self.p.chunk_size)
        return self.output(theta, read, parts), cache

    @layer_method
    def run_step(
        self, theta: NestedMap, x_BLM: tf.Tensor, cache: NestedMap
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns the same as `run_rows`, for one token of each row after a cache."""
        parts, new = self._convolved(theta, x_BLM, None, cache)
        inputs = self.inputs(theta, parts)
        token = type(inputs)(**{name: x[:, 0] for name, x in vars(inputs).items()})
        read, new.state = self.rule.run_step(token, cache.state)
        return self.output(theta, read[:, None], parts), new

    def _convolved(
        self,
        theta: NestedMap,
        x_BLM: tf.Tensor,
        segments_BL: tf.Tensor | None,
        cache: NestedMap | None = None,
    ) -> tuple[dict[str, tf.Tensor], NestedMap]:
        """Returns the products with the input, some convolved, and the last inputs of these."""
        parts, new = self.project(theta, x_BLM), NestedMap()
        for name, letters in self.convolved.items():
            x, layout, recent = parts[name], f"BL{letters}", f"recent_{name}"
            taps = tf.cast(theta[f"w_{name}_taps"], tf.float32)
            if cache is None:
                total, new[recent] = self._convolve(x, taps, layout, segments_BL)
            else:
                total, new[recent] = _step(x, taps, layout, cache[recent])
            parts[name] = self.activate(theta, name, total)
        return parts, new

    def _convolve(
        self, x: tf.Tensor, taps: tf.Tensor, layout: str, segments_BL: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the sums of a convolution that reads no earlier segment, and its last inputs."""
        width, length = self.p.convolution_width, known_sizes(x.shape)[1]
        total = tf.zeros_like(x, tf.float32)
        for back in range(min(width, length)):
            shifted = _shifted(x, segments_BL, back, layout)
            total += tf.cast(shifted, tf.float32) * taps[width - 1 - back]
        # The last tokens of the last segment.
        is_last_BL = tf.equal(segments_BL, segments_BL[:, -1:])
        kept = min(width - 1, length)
        last = tf.where(_like(is_last_BL, x), x, 0)[:, length - kept :]
        last = tf.pad(last, [[0, 0], [width - 1 - kept, 0], *[[0, 0]] * (x.shape.rank - 2)])
        return total, _heads_first(last, layout)


def _step(
    x: tf.Tensor, taps: tf.Tensor, layout: str, recent: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the sums of a convolution for one token after its recent inputs, and the next."""
    read = tf.concat([recent, _heads_first(x, layout)], 2)
    order = [1, 0, *range(2, taps.shape.rank)]
    return tf.reduce_sum(read * tf.transpose(taps, order), 2)[:, None], read[:, :, 1:]


def _heads_first(x: tf.Tensor, layout: str) -> tf.Tensor:
    """Returns float32 inputs with the first letter after "BL" before their positions, t."""
    x = tf.transpose(tf.cast(x, tf.float32), [0, 2, 1, *range(3, x.shape.rank)])
    return annotate(x, f"B{layout[2]}t{layout[3:]}")


def _like(x_BL: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Returns x_BL in the shape [B,L,1,...], with the rank of x."""
    return tf.reshape(x_BL, [*known_sizes(x_BL.shape), *[1] * (x.shape.rank - 2)])


def _shifted(x: tf.Tensor, segments_BL: tf.Tensor, back: int, layout: str) -> tf.Tensor:
    """Returns x shifted by `back` positions, with zeros where a segment begins."""
    if not back:
        return x
    before = tf.pad(x[:, :-back], [[0, 0], [back, 0], *[[0, 0]] * (x.shape.rank - 2)])
    before_BL = tf.pad(segments_BL[:, :-back], [[0, 0], [back, 0]], constant_values=-1)
    return annotate(tf.where(_like(tf.equal(before_BL, segments_BL), x), before, 0), layout)


@extend.register(Recurrence)
def _(
    layer: Recurrence,
    theta: NestedMap,
    x_BLM: tf.Tensor,
    view: CacheView,
    visible: Visible,
    cache: NestedMap | None = None,
) -> tuple[tf.Tensor, NestedMap]:
    """Caches the states, and the inputs of convolutions that the next token also reads.

    Without a cache, the new tokens are rows that end with their texts.
    """
    del visible
    if cache is None:
        assert view.mask is not None and view.mask.segments_BL is not None
        return layer.run_rows(theta, x_BLM, view.mask.segments_BL)
    batch, length, _ = known_sizes(x_BLM.shape)
    check_one_text(layer, length)
    # A text that begins finds what the last text of its row has left.
    is_old_BL = tf.cast(view.positions_BL > 0, tf.float32)
    left = NestedMap()
    for name, shape in state_shapes(layer, batch, length).items():
        own = tf.reshape(cache[name], shape)
        left[name] = own * _like(is_old_BL, own)
    y_BLM, new = layer.run_step(theta, x_BLM, left)
    return y_BLM, NestedMap({name: tf.reshape(new[name], cache[name].shape) for name in cache})


@cache_shapes.register(CausalMixer)
def _(layer: CausalMixer, rows: int, slots: int) -> dict[str, tuple[int, ...]]:
    """Returns no shapes: states have no slots."""
    del layer, rows, slots
    return {}


@state_shapes.register(Recurrence)
def _(layer: Recurrence, rows: int, positions: int) -> dict[str, tuple[int, ...]]:
    del positions
    shapes = {"state": (rows, *layer.sizes_of(layer.state_letters))}
    for name, letters in layer.convolved.items():
        first, *rest = layer.sizes_of(letters)
        shapes[f"recent_{name}"] = (rows, first, layer.p.convolution_width - 1, *rest)
    return shapes
