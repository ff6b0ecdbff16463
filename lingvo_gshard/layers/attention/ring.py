"""Ring attention: queries stay on the devices that have them, keys and values go around.

Liu et al. 2023, arXiv 2310.01889, section 3. Rows are cut into as many parts as L is split into,
and each part of queries attends to one part of keys after another; meanwhile every device hands the
keys it has to the next one. There is no manual region: parts are a dimension, L, split over the
mesh, and so the partitioner finds local products and a collective-permute. Within a part positions
of queries are S, those of keys K.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.attention import running_softmax
from lingvo_gshard.layers.attention.mask import BEHIND, block_bias
from lingvo_gshard.layers.attention.running_softmax import Done, Sums
from lingvo_gshard.layers.attention.soft_cap import soft_cap
from lingvo_gshard.sharding import annotate, einsum
from lingvo_gshard.sharding.partitioning import current_partitioning
from lingvo_gshard.sharding.rotation import rotated

ALL_GATHER, RING = "all_gather", "ring"
EXCHANGES = (ALL_GATHER, RING)

# Which dimension of tensors the parts are.
_PARTS = 2


def check(p: Params, path: str) -> None:
    """Raises ValueError naming the Params of an attention whose keys cannot be exchanged so."""
    if p.key_exchange not in EXCHANGES:
        raise ValueError(
            f"{path}.key_exchange: {p.key_exchange!r}. {names.nearest(p.key_exchange, EXCHANGES)}"
        )
    for name in ("dropout_rate", "relative_buckets"):
        if p.key_exchange == RING and p.get(name):
            raise ValueError(
                f"{path}.key_exchange: 'ring' with {path}.{name}, {p.get(name)}; a ring has none, "
                "0 was expected"
            )


@dataclasses.dataclass(frozen=True)
class Ring:
    """Which keys a query sees, and how many of a part are read at a time.

    segments_BL, key_segments_BK: as of `segment_bias`. block_size: keys read at a time; 0: all of
    a part. option: the hyperparameter that asked for a ring, for messages.
    """

    segments_BL: tf.Tensor
    key_segments_BK: tf.Tensor
    block_size: int
    is_causal: bool
    window: int
    cap: float
    option: str

    def attend(
        self, query_BNLD: tf.Tensor, keys_BNKD: tf.Tensor, values_BNKD: tf.Tensor
    ) -> tf.Tensor:
        """Returns softmax(q k + bias) v [B,N,L,D]; sums and the softmax are float32.

        Of keys and values there may be fewer heads, each for as many of queries in a row. There are
        as many parts as the partitioning in use splits L into; without one, or where it splits no
        L, it is one part, and nothing goes around. Raises ValueError if L or K does not divide.
        """
        parts = _count_parts(_PARTS)
        for letter, length in (("L", query_BNLD.shape[2]), ("K", keys_BNKD.shape[2])):
            if length % parts:
                raise ValueError(
                    f"{self.option}: a ring of {parts} devices has equal parts of rows, and "
                    f"{letter} is {length}; a multiple of {parts} was expected"
                )

        # Segments are arguments: TensorFlow does not find what only a loop in a gradient reads.
        @custom_gradient
        def compute(
            query_BNLD: tf.Tensor,
            keys_BNKD: tf.Tensor,
            values_BNKD: tf.Tensor,
            segments_BL: tf.Tensor,
            key_segments_BK: tf.Tensor,
        ):
            query = _cut(query_BNLD, parts, _PARTS)
            held = [_cut(x, parts, _PARTS) for x in (keys_BNKD, values_BNKD)]
            segments = [_cut(x, parts, 1) for x in (segments_BL, key_segments_BK)]
            own_segments = _without_heads(segments[0], "BLS")
            run = _Run(self, annotate(query, "BNLSD"), own_segments)
            held = run.filled(*held, segments[1])
            sums = run.forward(held)
            mixed = sums.result(query.dtype)

            def gradient(d_BNLD: tf.Tensor) -> tuple[tf.Tensor | None, ...]:
                d_mixed = annotate(_cut(d_BNLD, parts, _PARTS), "BNLSD")
                found = run.backward(held, d_mixed, sums.done(d_mixed, mixed))
                d_query, d_keys, d_values = (tf.cast(x, query.dtype) for x in found)
                d_query = annotate(_joined(d_query, query_BNLD.shape), "BNLD")
                return (
                    d_query,
                    *(_joined(x, keys_BNKD.shape) for x in (d_keys, d_values)),
                    None,
                    None,
                )

            return annotate(_joined(mixed, query_BNLD.shape), "BNLD"), gradient

        return compute(query_BNLD, keys_BNKD, values_BNKD, self.segments_BL, self.key_segments_BK)


Held = tuple[tf.Tensor, tf.Tensor, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class _Run:
    """Parts of queries [B,N,L,S,D] and of their segments [B,L,S], and what goes around by them.

    Held are keys and values [B,N,L,K,D] and the keys' segments [B,L,K]: part l of queries has at
    turn t what part l - t had at first.
    """

    ring: Ring
    query: tf.Tensor
    segments: tf.Tensor

    @property
    def parts(self) -> int:
        return self.query.shape[_PARTS]

    def filled(self, keys: tf.Tensor, values: tf.Tensor, segments: tf.Tensor) -> Held:
        """What is held at first, filled up so that blocks divide it."""
        missing = -keys.shape[3] % (self.ring.block_size or keys.shape[3])
        behind = [[0, 0], [0, 0], [0, missing]]
        keys, values = (tf.pad(x, [[0, 0], *behind, [0, 0]]) for x in (keys, values))
        return (
            self._annotate(keys),
            self._annotate(values),
            _without_heads(tf.pad(segments, behind, constant_values=BEHIND), "BLK"),
        )

    def forward(self, held: Held) -> Sums:
        """Returns the sums over all keys."""

        def turn(index: tf.Tensor, held: Held, sums: Sums) -> tuple:
            passed_on = self._passed_on(held)
            return index + 1, passed_on, self._visit(index, held, sums)

        start = (tf.constant(0), held, running_softmax.no_keys(self.query, "BNLSD"))
        return self._visit(*self._turns(turn, start))

    def backward(self, held: Held, d_mixed: tf.Tensor, done: Done) -> tuple[tf.Tensor, ...]:
        """Returns the gradients of queries, keys and values, float32.

        Those of keys and values go around with these, and one device on at the end: home.
        """

        def turn(index: tf.Tensor, held: Held, found: tuple) -> tuple:
            passed_on = self._passed_on(held)
            d_query, *of_keys = self._visit_back(index, held, found, d_mixed, done)
            return index + 1, passed_on, (d_query, *self._passed_on(of_keys))

        zeros = [tf.zeros(x.shape, tf.float32) for x in (self.query, *held[:2])]
        zeros = (annotate(zeros[0], "BNLSD"), *map(self._annotate, zeros[1:]))
        last = self._turns(turn, (tf.constant(0), held, zeros))
        d_query, *of_keys = self._visit_back(*last, d_mixed, done)
        return d_query, *self._passed_on(of_keys)

    def _turns(self, turn: Callable, start: tuple) -> tuple:
        """All turns but the last, after which nothing needs to be handed on."""
        count = self.parts - 1
        if not count:
            return start
        return tf.while_loop(lambda index, *_: index < count, turn, start, maximum_iterations=count)

    def _visit(self, index: tf.Tensor, held: Held, sums: Sums) -> Sums:
        def block(first: int | tf.Tensor, sums: Sums) -> Sums:
            keys, values, segments = self._block(held, first)
            logits, _ = self._logits(index, first, keys, segments)
            return running_softmax.with_keys(sums, logits, values, "BNLSK,BNLKD->BNLSD")

        size = self._block_size(held)
        if size == held[0].shape[3]:
            return block(0, sums)
        count = held[0].shape[3] // size
        _, sums = tf.while_loop(
            lambda i, _: i < count,
            lambda i, sums: (i + 1, block(i * size, sums)),
            (tf.constant(0), sums),
            maximum_iterations=count,
        )
        return sums

    def _visit_back(
        self, index: tf.Tensor, held: Held, found: tuple, d_mixed: tf.Tensor, done: Done
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The gradients with what the keys held now add to them."""
        d_query, d_keys, d_values = found
        size = self._block_size(held)
        count = held[0].shape[3] // size
        if count == 1:
            d_query, more_keys, more_values = self._block_back(
                index, 0, held, d_query, d_mixed, done
            )
            return (
                d_query,
                self._annotate(d_keys + more_keys),
                self._annotate(d_values + more_values),
            )
        shape = [*d_keys.shape[:3], size, d_keys.shape[4]]

        def body(i: tf.Tensor, d_query: tf.Tensor, *stacks: tf.TensorArray) -> tuple:
            d_query, *more = self._block_back(index, i * size, held, d_query, d_mixed, done)
            written = (s.write(i, m) for s, m in zip(stacks, more, strict=True))
            return i + 1, d_query, *written

        stacks = (tf.TensorArray(tf.float32, count, element_shape=shape) for _ in range(2))
        start = (tf.constant(0), d_query, *stacks)
        _, d_query, *stacks = tf.while_loop(
            lambda i, *_: i < count, body, start, maximum_iterations=count
        )
        more = [tf.transpose(s.stack(), (1, 2, 3, 0, 4, 5)) for s in stacks]
        more_keys, more_values = (tf.reshape(x, d_keys.shape) for x in more)
        return (
            d_query,
            self._annotate(d_keys + more_keys),
            self._annotate(d_values + more_values),
        )

    def _block_back(
        self,
        index: tf.Tensor,
        first: int | tf.Tensor,
        held: Held,
        d_query: tf.Tensor,
        d_mixed: tf.Tensor,
        done: Done,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """d_query with what a block adds, and the gradients of its keys and values."""
        keys, values, segments = self._block(held, first)
        logits, capped = self._logits(index, first, keys, segments)
        d_weights = einsum("BNLSD,BNLKD->BNLSK", d_mixed, values)
        weights, d_logits = running_softmax.gradients(
            done, logits, capped, d_weights, self.ring.cap
        )
        more = einsum("BNLSK,BNLKD->BNLSD", d_logits, keys)
        d_query = annotate(d_query + tf.cast(more, tf.float32), "BNLSD")
        d_keys = einsum("BNLSK,BNLSD->BNLKD", d_logits, self.query)
        d_values = einsum("BNLSK,BNLSD->BNLKD", weights, d_mixed)
        heads = held[0].shape[1]
        return d_query, _summed_heads(d_keys, heads), _summed_heads(d_values, heads)

    def _block_size(self, held: Held) -> int:
        return min(self.ring.block_size or held[0].shape[3], held[0].shape[3])

    def _block(self, held: Held, first: int | tf.Tensor) -> Held:
        """A block of what is held; keys and values of as many heads as queries have."""
        keys, values, segments = held
        size = self._block_size(held)
        if size < keys.shape[3]:
            start, shape = [0, 0, 0, first, 0], [*keys.shape[:3], size, keys.shape[4]]
            keys, values = (self._annotate(tf.slice(x, start, shape)) for x in (keys, values))
            segments = tf.slice(segments, [0, 0, first], [*segments.shape[:2], size])
        times = self.query.shape[1] // keys.shape[1]
        return _repeated_heads(keys, times), _repeated_heads(values, times), segments

    def _logits(
        self, index: tf.Tensor, first: int | tf.Tensor, keys: tf.Tensor, segments: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Float32 logits [B,N,L,S,K] of a block, and what they were before any bias."""
        products = einsum("BNLSD,BNLKD->BNLSK", self.query, keys)
        capped = soft_cap(tf.cast(products, tf.float32), self.ring.cap)
        return capped + self._bias(index, first, segments), capped

    def _bias(self, index: tf.Tensor, first: int | tf.Tensor, segments: tf.Tensor) -> tf.Tensor:
        """`block_bias` [B,1,L,S,K]."""
        ring = self.ring
        part_L = tf.range(self.parts)[:, None, None]
        owner_L = tf.math.floormod(part_L - index, self.parts)
        keys_of_part = ring.key_segments_BK.shape[1] // self.parts
        query_L = part_L * self.segments.shape[2] + tf.range(self.segments.shape[2])[:, None]
        key_L = owner_L * keys_of_part + first + tf.range(segments.shape[2])
        distances = annotate(key_L - query_L, "LSK", reserved="BN")
        query = self.segments[..., None]
        keys = segments[:, :, None, :]
        bias = block_bias(query, keys, distances, ring.is_causal, ring.window)
        return _without_heads(bias, "BLSK")[:, None]

    def _passed_on(self, held: tuple) -> tuple:
        """What every part holds, handed to the next one."""
        if self.parts == 1:
            return tuple(held)
        return tuple(self._next(x) for x in held)

    def _next(self, x: tf.Tensor) -> tf.Tensor:
        if x.shape.rank == 3:
            return _without_heads(rotated(x, 1), "BLK")
        return self._annotate(rotated(x, _PARTS))

    def _annotate(self, x: tf.Tensor) -> tf.Tensor:
        """Annotated as keys; heads that devices cannot share evenly are whole."""
        return annotate(x, "BNLKD", unsplit="N" if x.shape[1] % _count_parts(1) else "")


def _count_parts(dimension: int) -> int:
    """Into how many parts a dimension of [B,N,L,D] is split."""
    current = current_partitioning()
    if current is None or tf.executing_eagerly():
        return 1
    return current.parts(current.split("BNLD", path=context.layer_path())[dimension])


def _without_heads(x: tf.Tensor, layout: str) -> tf.Tensor:
    """Annotated to go with what has heads."""
    return annotate(x, layout, reserved="N")


def _cut(x: tf.Tensor, parts: int, dimension: int) -> tf.Tensor:
    """One dimension as parts, and positions within them."""
    shape = x.shape.as_list()
    cut = [parts, shape[dimension] // parts]
    return tf.reshape(x, [*shape[:dimension], *cut, *shape[dimension + 1 :]])


def _joined(x: tf.Tensor, shape_BNLD: tf.TensorShape) -> tf.Tensor:
    """The reverse of `_cut`, without what blocks were filled up with."""
    batch, heads, length, head_dim = shape_BNLD.as_list()
    parts = x.shape[_PARTS]
    return tf.reshape(x[:, :, :, : length // parts], [batch, heads, length, head_dim])


def _repeated_heads(x: tf.Tensor, times: int) -> tf.Tensor:
    """Each head `times` times in a row."""
    if times == 1:
        return x
    batch, heads, *rest = x.shape.as_list()
    repeated = tf.broadcast_to(x[:, :, None], [batch, heads, times, *rest])
    return annotate(tf.reshape(repeated, [batch, heads * times, *rest]), "BNLKD")


def _summed_heads(x: tf.Tensor, heads: int) -> tf.Tensor:
    """Float32; the reverse of `_repeated_heads` for gradients."""
    x = tf.cast(x, tf.float32)
    batch, repeated, *rest = x.shape.as_list()
    if repeated == heads:
        return x
    return tf.reduce_sum(tf.reshape(x, [batch, heads, repeated // heads, *rest]), 2)
