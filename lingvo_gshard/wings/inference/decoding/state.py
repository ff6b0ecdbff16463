"""The kind of a decoding program: how it chooses tokens, and the sizes of its state.

docs/architecture.md describes the state: B rows, each with a text and its W hypotheses, share a
ring of T positions with W slots each. A row has the `position_B` positions written last.

Lists of blocks are slots. Layers such as GatedDeltaNet keep single arrays, with what all tokens of
a row's text so far have left. Such layers need a beam of 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

from lingvo_gshard.core import NestedMap, tf
from lingvo_gshard.layers import TransformerStack
from lingvo_gshard.tasks import TokenTask
from lingvo_gshard.wings.inference.layers import transformer
from lingvo_gshard.wings.inference.layers.cached import CacheView, block_count

# Outputs of each step that the host reads: [B,W] arrays, and [B,W,e] arrays of END_RECORD with a
# value for each id that ends a text. A call returns them with a dimension of steps before.
TOKEN_RECORD = ("token_BW", "log_probability_BW")
END_RECORD = ("end_BWe", "end_log_probability_BWe")
BEAM_RECORD = (*TOKEN_RECORD, "parent_BW", *END_RECORD, "last_BW")


@dataclasses.dataclass(frozen=True)
class SearchKind:
    """The choice of tokens that a program is compiled for. Options of a request are data.

    Attributes:
      beam: W, the hypotheses of a row; 1 for greedy decoding and sampling.
      draws: whether tokens are drawn; else the best are taken. Only with a beam of 1.
      penalizes_repetition: whether tokens that occurred are less likely. Only with a beam of 1.
      restricts_tokens: whether rows have sets of tokens that they may choose.
      covers: whether the search rewards attention to all of the source. Only with a beam.
    """

    beam: int = 1
    draws: bool = False
    penalizes_repetition: bool = False
    restricts_tokens: bool = False
    covers: bool = False


@dataclasses.dataclass(frozen=True)
class StateShape:
    """The sizes of a state.

    Attributes:
      rows: B.
      length: T, positions of the ring.
      memory_length: K, positions of the source; 0 for a model without one.
    """

    rows: int
    length: int
    memory_length: int = 0

    def holds(self, other: StateShape) -> bool:
        """Returns whether texts that fit the other shape fit this one."""
        return (
            self.rows >= other.rows
            and self.length >= other.length
            and self.memory_length >= other.memory_length
        )


def record_names(kind: SearchKind) -> tuple[str, ...]:
    """Returns the names of what each step records for the host, in order."""
    return BEAM_RECORD if kind.beam > 1 else TOKEN_RECORD


LOCAL_LETTERS = {"w": "the two words of a random key, or the slots of a position"}

# (stack, rows, slots) -> the shapes of each layer's arrays by name.
Shapes: TypeAlias = "Callable[[TransformerStack, int, int], list[dict[str, tuple[int, ...]]]]"

# Larger than any score of a hypothesis that does not exist.
IMPOSSIBLE = -1e9


def state_specs(
    model: TokenTask,
    kind: SearchKind,
    shape: StateShape,
    vocabulary_size: int,
    dtype: tf.DType,
    in_blocks: bool = True,
) -> NestedMap:
    """Returns the tree of tf.TensorSpec of a state; the slots of a row may be `in_blocks`."""
    rows, beam = shape.rows, kind.beam

    def spec(*sizes: int, of: Any = tf.int32) -> tf.TensorSpec:
        return tf.TensorSpec((rows, *sizes), of)

    def slots(shapes: Shapes, positions: int, width: int = 1) -> list[NestedMap]:
        count = block_count(rows, positions, width) if in_blocks else 1
        return [
            NestedMap({name: [tf.TensorSpec(s, dtype)] * count for name, s in layer.items()})
            for layer in shapes(model.decoder, rows, positions * width // count)
        ]

    state = NestedMap(
        time=tf.TensorSpec((), tf.int32),
        caches=_with_states(
            slots(transformer.stack_cache_shapes, shape.length, beam), model, shape
        ),
        ids_BW=spec(beam),
        is_active_B=spec(),
        position_B=spec(),
        generated_B=spec(),
        limit_B=spec(),
        least_B=spec(),
    )
    if shape.memory_length:
        state.memory = NestedMap(
            layers=slots(transformer.stack_memory_shapes, shape.memory_length),
            bias_BK=spec(shape.memory_length, of=tf.float32),
        )
    if beam > 1:
        state.score_BW = spec(beam, of=tf.float32)
        state.ended_BW = spec(beam, of=tf.float32)
        state.ancestor_BWT = spec(beam, shape.length)
        state.wanted_B = spec()
        state.length_exponent_B = spec(of=tf.float32)
    if kind.covers:
        state.coverage_BWK = spec(beam, shape.memory_length, of=tf.float32)
        state.coverage_weight_B = spec(of=tf.float32)
    state.update(_choice_specs(kind, spec, vocabulary_size))
    return state


def _with_states(slots: list[NestedMap], model: TokenTask, of: StateShape) -> list[NestedMap]:
    """Returns the slots of each layer with its arrays that have no slots."""
    states = [
        {name: tf.TensorSpec(shape, tf.float32) for name, shape in layer.items()}
        for layer in transformer.stack_state_shapes(model.decoder, of.rows, of.length)
    ]
    return [NestedMap({**one, **other}) for one, other in zip(slots, states, strict=True)]


def _choice_specs(
    kind: SearchKind, spec: Callable[..., tf.TensorSpec], vocabulary_size: int
) -> NestedMap:
    """Returns the leaves of a state for drawn tokens, and for tokens that rows may choose."""
    found = NestedMap()
    if kind.draws:
        for name in ("temperature_B", "top_p_B", "min_p_B"):
            found[name] = spec(of=tf.float32)
        found.update(top_k_B=spec(), word_B=spec(), key_Bw=spec(2))
    if kind.penalizes_repetition:
        found.repetition_B = spec(of=tf.float32)
        found.seen_BV = spec(vocabulary_size)
    if kind.restricts_tokens:
        found.allowed_BV = spec(vocabulary_size)
    return found


def slot_count(state: NestedMap) -> int:
    """Returns the number of slots of each row: W for each position of the ring.

    It is W if no layer has slots: then no layer looks at positions of the ring either.
    """
    for cache in state.caches:
        if "key" in cache:
            return sum(block.shape[-2] for block in cache.key)
    return state.ids_BW.shape[1]


def ages(time: tf.Tensor, length: int) -> tf.Tensor:
    """Returns int32 [T]: how many positions before `time`, 0 or more, each one was written."""
    return tf.math.floormod(time - tf.range(length), length)


def next_token_view(state: NestedMap, beam: int) -> CacheView:
    """Returns the view of one new token for each hypothesis of every row.

    The ancestor of the new position must be set already.
    """
    rows, slots = state.ids_BW.shape[0], slot_count(state)
    length = slots // beam
    age_T = ages(state.time, length)
    is_past_BT = age_T[None, :] <= state.position_B[:, None]
    positions_BW = tf.broadcast_to(state.position_B[:, None], [rows, beam])
    first_slot = tf.math.floormod(state.time, length) * beam
    if beam == 1:
        return CacheView(
            positions_BW,
            is_past_BT[:, None, :],
            -age_T[None, :],
            first_slot,
            past_B=tf.minimum(state.position_B, length - 1),
        )
    is_own_BWTw = tf.equal(state.ancestor_BWT[..., None], tf.range(beam))
    is_visible = is_past_BT[:, None, :, None] & is_own_BWTw
    distances = tf.repeat(-age_T, beam)
    return CacheView(
        positions_BW,
        tf.reshape(is_visible, [rows, beam, slots]),
        tf.broadcast_to(distances, [beam, slots]),
        first_slot,
    )
