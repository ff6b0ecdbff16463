"""Decoding steps: rows that new texts enter, and a loop that adds a token to every row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

from lingvo_gshard.core import NestedMap, context, scopes, shapes, tf
from lingvo_gshard.layers import MASKED
from lingvo_gshard.sharding import annotate, axes_of, platform_in_use
from lingvo_gshard.tasks import TokenTask, TranslationTask
from lingvo_gshard.wings.inference.decoding import state as states
from lingvo_gshard.wings.inference.decoding.beam import add_coverage, extend_beam
from lingvo_gshard.wings.inference.decoding.greedy import choose_best
from lingvo_gshard.wings.inference.decoding.models import encode_memory, extend_texts, next_logits
from lingvo_gshard.wings.inference.decoding.sampling import draw
from lingvo_gshard.wings.inference.layers import cached
from lingvo_gshard.wings.inference.layers.cached import with_row, without_row
from lingvo_gshard.wings.inference.model_facts import NO_TOKEN
from lingvo_gshard.wings.inference.stored_weights import restore

LOCAL_LETTERS = {
    "e": "ids that end a text",
    "i": "steps of one call",
    "a": "texts that enter together",
    "p": "positions of given tokens",
}


@dataclasses.dataclass(frozen=True)
class Steps:
    """Runs decoding steps of one model, `most` at most in a call."""

    model: TokenTask
    kind: states.SearchKind
    end_ids: tuple[int, ...]
    most: int

    def run(
        self, weights: NestedMap, state: NestedMap, most_steps: tf.Tensor, enough: tf.Tensor
    ) -> tuple[NestedMap, NestedMap]:
        """Runs steps until there are enough of them, or enough rows have ended.

        Args:
          weights: `decoding_weights` of the model.
          state: the state; `time` counts positions of the ring.
          most_steps: int32 scalar, the largest number of steps.
          enough: int32 scalar; the call returns when this many rows have ended in it.

        Returns:
          The state after the steps, and the records [i,B,W] or [i,B,W,e] by name; see
          `record_names`.
        """
        # Once for all steps, and not in each.
        weights = restore(weights, only_small=True)
        rows, beam = state.ids_BW.shape
        active_before = tf.reduce_sum(state.is_active_B)
        records = NestedMap()
        for name in states.record_names(self.kind):
            is_integer = name in ("token_BW", "parent_BW")
            dtype = tf.int32 if is_integer else tf.float32
            ends = [len(self.end_ids)] if name in states.END_RECORD else []
            records[name] = tf.zeros([self.most, rows, beam, *ends], dtype)

        def is_running(step, state, records):
            del records
            active = tf.reduce_sum(state.is_active_B)
            goes_on = (active > 0) & (active_before - active < enough)
            return (step < tf.minimum(most_steps, self.most)) & goes_on

        def run_one(step, state, records):
            state, record = self._step(weights, state)
            records = NestedMap(
                {n: shapes.write_slice(x, record[n][None], step) for n, x in records.items()}
            )
            return step + 1, state, records

        with context.scope(training=False):
            start = (tf.constant(0), _caches_of(state, without_row), records)
            name = scopes.loop_name(self.most)
            _, state, records = tf.while_loop(is_running, run_one, start, name=name)
        return _caches_of(state, with_row), records

    def _step(self, weights: NestedMap, state: NestedMap) -> tuple[NestedMap, NestedMap]:
        """Returns the state after one token more, and what the step chose."""
        kind, state = self.kind, NestedMap(state)
        if kind.beam > 1:
            state.ancestor_BWT = _with_own_slot(state)
        view = states.next_token_view(state, kind.beam)
        mask_BL = tf.broadcast_to(state.is_active_B[:, None], state.ids_BW.shape)
        x_BWM, state.caches, weights_BNWK = extend_texts(
            self.model, weights, state.ids_BW, mask_BL, view, state.caches, state.get("memory")
        )
        logits_BWV = next_logits(self.model, weights, x_BWM)
        # Choosing compares all tokens: gathered once, not for each comparison.
        logits_BWV = annotate(logits_BWV, "BLV", unsplit="V")
        if kind.covers:
            state.coverage_BWK = add_coverage(state, weights_BNWK)
        if kind.beam > 1:
            choice = extend_beam(logits_BWV, state, self.end_ids)
            state = _with_beam(state, choice)
            is_done_B = choice.is_done_B
        else:
            choose = draw if kind.draws else choose_best
            choice = choose(logits_BWV, state, self.end_ids)
            is_done_B = tf.reduce_any(tf.equal(choice.token_BW, self.end_ids), 1)
            is_done_B |= state.generated_B + 1 >= state.limit_B
        state.ids_BW = choice.token_BW
        if kind.penalizes_repetition:
            is_token_BV = tf.equal(tf.range(state.seen_BV.shape[1]), choice.token_BW)
            state.seen_BV = tf.where(is_token_BV, 1, state.seen_BV)
        state.position_B += state.is_active_B
        state.generated_B += state.is_active_B
        state.is_active_B = tf.where(is_done_B, 0, state.is_active_B)
        state.time += 1
        return state, choice


def _caches_of(
    state: NestedMap, change: Callable[[Sequence[NestedMap]], list[NestedMap]]
) -> NestedMap:
    """Returns the state of a single row with changed caches; any other state as it is.

    Platforms with kernels keep the row: only XLA for CPU would copy the caches.
    """
    state = NestedMap(state)
    if state.ids_BW.shape[0] == 1 and not platform_in_use():
        state.caches = change(state.caches)
    return state


def _with_own_slot(state: NestedMap) -> tf.Tensor:
    """Makes each hypothesis its own ancestor at the new position; returns the new ancestor_BWT."""
    _, beam, length = state.ancestor_BWT.shape
    is_new_T = tf.equal(tf.range(length), tf.math.floormod(state.time, length))
    return tf.where(is_new_T, tf.range(beam)[:, None], state.ancestor_BWT)


def _with_beam(state: NestedMap, choice: NestedMap) -> NestedMap:
    """Returns the state with the new beam. Keys and values stay where they are."""
    state.ancestor_BWT = tf.gather(state.ancestor_BWT, choice.parent_BW, batch_dims=1)
    if "coverage_BWK" in state:
        state.coverage_BWK = tf.gather(state.coverage_BWK, choice.parent_BW, batch_dims=1)
    state.score_BW, state.ended_BW = choice.score_BW, choice.ended_BW
    return state


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
    """Lets new texts into free rows of a state."""

    model: TokenTask
    kind: states.SearchKind

    def run(
        self, weights: NestedMap, state: NestedMap, new: NestedMap, text_of_row_B: tf.Tensor
    ) -> NestedMap:
        """Returns the state with new texts in some of its rows.

        The source of each text is encoded and its given tokens are computed in one pass.

        Args:
          weights: `decoding_weights` of the model.
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
        if "caches" in entering and platform_in_use() and not axes_of("B")[0]:
            merged.caches = _with_rows(state.caches, entering.pop("caches"), text_of_row_B)
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
            translates = cast(TranslationTask, self.model)
            memory = encode_memory(translates, weights, new.source_aK)
            rows.memory = _fitted(memory, state.memory)
        if beam > 1:
            first_W = tf.equal(tf.range(beam), 0)
            score_W = tf.where(first_W, 0.0, states.IMPOSSIBLE)
            rows.score_BW = tf.tile(score_W[None], [count, 1])
            rows.ended_BW = tf.fill([count, beam], states.IMPOSSIBLE)
            rows.ancestor_BWT = tf.zeros([count, *state.ancestor_BWT.shape[1:]], tf.int32)
        if self.kind.covers:
            rows.coverage_BWK = tf.zeros([count, *state.coverage_BWK.shape[1:]])
        if "given_ap" in new:
            is_token_ap = tf.not_equal(new.given_ap, NO_TOKEN)
            view = cached.row_view(is_token_ap, is_causal=True)
            is_token_ap = tf.cast(is_token_ap, tf.int32)
            rows.position_B = tf.reduce_sum(is_token_ap, 1)
            given_ap = tf.maximum(new.given_ap, 0)
            _, caches, _ = extend_texts(
                self.model, weights, given_ap, is_token_ap, view, None, rows.get("memory")
            )
            rows.caches = _blocks_of(
                caches,
                state.caches,
                lambda x: _in_ring(x, state.time, states.slot_count(state), beam),
            )
        return rows


def _with_rows(
    caches: Sequence[NestedMap], entering: Sequence[NestedMap], text_of_row_B: tf.Tensor
) -> list[NestedMap]:
    """Returns caches with the rows of new texts written in place. The other rows are not moved.

    XLA for CPU would copy the caches into the loop. Devices that each have some of the rows would
    have to agree on one that is written.
    """
    old, new = (tf.nest.flatten(list(each)) for each in (caches, entering))
    count = new[0].shape[0]

    def write(text: tf.Tensor, *arrays: tf.Tensor) -> tuple[tf.Tensor, ...]:
        is_its_row_B = tf.equal(text_of_row_B, text)
        row = tf.argmax(tf.cast(is_its_row_B, tf.int32), output_type=tf.int32)
        enters = tf.reduce_any(is_its_row_B)
        written = []
        for array, values in zip(arrays, new, strict=True):
            its_row = shapes.read_slice(values, text, 1)
            its_row = tf.where(enters, its_row, shapes.read_slice(array, row, 1))
            written.append(shapes.write_slice(array, its_row, row))
        return text + 1, *written

    _, *written = tf.while_loop(
        lambda text, *_: text < count, write, (tf.constant(0), *old), name=scopes.loop_name(count)
    )
    return tf.nest.pack_sequence_as(list(caches), written)


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
    """Returns each layer's arrays with slots, changed and in as many blocks as `targets` have."""

    def fitted(array: Any, target: Any) -> Any:
        if not isinstance(target, list):
            more = [t - n for n, t in zip(array.shape[1:], target.shape[1:], strict=True)]
            return tf.pad(array, [[0, 0], *([0, n] for n in more)]) if any(more) else array
        return cached.in_blocks(change(*array), len(target))

    return [
        NestedMap({name: fitted(layer[name], target[name]) for name in target})
        for layer, target in zip(layers, targets, strict=True)
    ]


def _in_ring(x_BNpD: tf.Tensor, time: tf.Tensor, slots: int, beam: int) -> tf.Tensor:
    """Returns right-aligned keys or values at the slots of the last positions of a ring."""
    given, length = x_BNpD.shape[2], slots // beam
    index_T = given - states.ages(time, length)
    at_T = tf.gather(x_BNpD, tf.clip_by_value(index_T, 0, given - 1), axis=2)
    if beam == 1:
        return at_T
    batch, heads, _, dim = x_BNpD.shape
    padded = tf.pad(at_T[:, :, :, None], [[0, 0], [0, 0], [0, 0], [0, beam - 1], [0, 0]])
    return tf.reshape(padded, [batch, heads, slots, dim])
