"""Rows of a state: how new texts enter it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

from lingvo_gshard.core import context
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.inference.decoding.models import DecodableModel, TranslationModel
from lingvo_gshard.inference.decoding.state import IMPOSSIBLE, SearchKind, ages, slot_count
from lingvo_gshard.layers.attention import cached
from lingvo_gshard.layers.attention.mask import MASKED
from lingvo_gshard.tasks.model_facts import NO_TOKEN

LOCAL_LETTERS = {"a": "texts that enter together", "p": "positions of given tokens"}

# Leaves of a state that are data of a row's request. The caller of `admit` gives them.
OPTION_LEAVES = (
    "limit_B",
    "least_B",
    "wanted_B",
    "length_exponent_B",
    "coverage_weight_B",
    "temperature_B",
    "top_k_B",
    "top_p_B",
    "min_p_B",
    "word_B",
    "key_Bw",
    "repetition_B",
    "seen_BV",
    "allowed_BV",
)


@dataclasses.dataclass(frozen=True)
class Admission:
    """Lets new texts into free rows of a state.

    Attributes:
      model: the model.
      kind: how tokens are chosen.
    """

    model: DecodableModel
    kind: SearchKind

    def run(
        self, weights: NestedMap, state: NestedMap, new: NestedMap, text_of_row_B: tf.Tensor
    ) -> NestedMap:
        """Returns the state with new texts in some of its rows.

        The source of each text is encoded and its given tokens are computed in one pass.

        Args:
          weights: `decoding_weights` of the model.
          state: the state.
          new: the texts that enter. `source_aK` has int32 ids of the source, NO_TOKEN in padding;
            the state's memory has at least as many positions. `last_a` has the last given token,
            int32. `given_ap` has the int32 ids before `last_a`, right-aligned, with NO_TOKEN on the
            left; it is missing if no text has such ids. `options` has, for each leaf of
            OPTION_LEAVES in the state, the values for the texts.
          text_of_row_B: int32, the text that enters each row; -1 where the row stays.
        """
        with context.scope(training=False):
            entering = self._rows_of(weights, state, new)
        enters_B = text_of_row_B >= 0
        text_B = tf.maximum(text_of_row_B, 0)

        def merge(new_value: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
            shape = [old.shape[0]] + [1] * (old.shape.rank - 1)
            return tf.where(tf.reshape(enters_B, shape), tf.gather(new_value, text_B), old)

        merged = NestedMap(state)
        for name, value in entering.items():
            merged[name] = tf.nest.map_structure(merge, value, state[name])
        return merged

    def _rows_of(self, weights: NestedMap, state: NestedMap, new: NestedMap) -> NestedMap:
        """Returns the leaves of a state, but with one row for each text."""
        (count,) = new.last_a.shape
        beam = self.kind.beam
        zeros_a = tf.zeros([count], tf.int32)
        rows = NestedMap(new.options)
        rows.update(
            ids_BW=tf.tile(new.last_a[:, None], [1, beam]),
            is_active_B=tf.ones([count], tf.int32),
            generated_B=zeros_a,
            position_B=zeros_a,
        )
        if "source_aK" in new:
            translates = cast(TranslationModel, self.model)
            memory = translates.encode_memory(weights, new.source_aK)
            rows.memory = _fitted(memory, state.memory)
        if beam > 1:
            first_W = tf.equal(tf.range(beam), 0)
            score_W = tf.where(first_W, 0.0, IMPOSSIBLE)
            rows.score_BW = tf.tile(score_W[None], [count, 1])
            rows.ended_BW = tf.fill([count, beam], IMPOSSIBLE)
            rows.ancestor_BWT = tf.zeros([count, *state.ancestor_BWT.shape[1:]], tf.int32)
        if self.kind.covers:
            rows.coverage_BWK = tf.zeros([count, *state.coverage_BWK.shape[1:]])
        if "given_ap" in new:
            is_token_ap = tf.not_equal(new.given_ap, NO_TOKEN)
            view = cached.row_view(is_token_ap, is_causal=True)
            is_token_ap = tf.cast(is_token_ap, tf.int32)
            rows.position_B = tf.reduce_sum(is_token_ap, 1)
            given_ap = tf.maximum(new.given_ap, 0)
            _, caches, _ = self.model.extend(
                weights, given_ap, is_token_ap, view, None, rows.get("memory")
            )
            rows.caches = _blocks_of(
                caches, state.caches, lambda x: _in_ring(x, state.time, slot_count(state), beam)
            )
        return rows


def _fitted(memory: NestedMap, target: NestedMap) -> NestedMap:
    """Returns a memory with positions without tokens at the end, in the blocks of another one."""
    more = target.bias_BK.shape[1] - memory.bias_BK.shape[1]
    return NestedMap(
        layers=_blocks_of(
            memory.layers,
            target.layers,
            lambda x_BNKD: tf.pad(x_BNKD, [[0, 0], [0, 0], [0, more], [0, 0]]),
        ),
        bias_BK=tf.pad(memory.bias_BK, [[0, 0], [0, more]], constant_values=MASKED),
    )


def _blocks_of(
    layers: Sequence[NestedMap],
    targets: Sequence[NestedMap],
    change: Callable[[tf.Tensor], tf.Tensor],
) -> list[NestedMap]:
    """Returns the arrays of each layer, changed and in as many blocks as `targets` have.

    Args:
      layers: lists of one block for each layer.
      targets: lists of blocks for each layer.
      change: what is done with a block first.
    """
    return [
        NestedMap(
            {name: cached.in_blocks(change(*layer[name]), len(target[name])) for name in target}
        )
        for layer, target in zip(layers, targets, strict=True)
    ]


def _in_ring(x_BNpD: tf.Tensor, time: tf.Tensor, slots: int, beam: int) -> tf.Tensor:
    """Returns right-aligned keys or values at the slots of the last positions of a ring."""
    given, length = x_BNpD.shape[2], slots // beam
    index_T = given - ages(time, length)
    at_T = tf.gather(x_BNpD, tf.clip_by_value(index_T, 0, given - 1), axis=2)
    if beam == 1:
        return at_T
    batch, heads, _, dim = x_BNpD.shape
    padded = tf.pad(at_T[:, :, :, None], [[0, 0], [0, 0], [0, 0], [0, beam - 1], [0, 0]])
    return tf.reshape(padded, [batch, heads, slots, dim])
