"""Decoding steps: a loop that adds a token to every row, several times in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lingvo_gshard.core import context, shapes
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.inference.decoding.beam import add_coverage, extend_beam
from lingvo_gshard.inference.decoding.greedy import choose_best
from lingvo_gshard.inference.decoding.models import DecodableModel
from lingvo_gshard.inference.decoding.sampling import draw
from lingvo_gshard.inference.decoding.state import (
    END_RECORD,
    SearchKind,
    next_token_view,
    record_names,
)
from lingvo_gshard.layers.attention.cached import with_row, without_row
from lingvo_gshard.layers.products import restore
from lingvo_gshard.layers.stacks import execution
from lingvo_gshard.sharding import annotate

LOCAL_LETTERS = {"e": "ids that end a text", "i": "steps of one call"}


@dataclasses.dataclass(frozen=True)
class Steps:
    """Runs decoding steps of one model.

    Attributes:
      model: the model.
      kind: how tokens are chosen.
      end_ids: ids that end a text, ascending.
      most: the largest number of steps of one call.
    """

    model: DecodableModel
    kind: SearchKind
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
        for name in record_names(self.kind):
            is_integer = name in ("token_BW", "parent_BW")
            dtype = tf.int32 if is_integer else tf.float32
            ends = [len(self.end_ids)] if name in END_RECORD else []
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
            name = execution.loop_name(self.most)
            _, state, records = tf.while_loop(is_running, run_one, start, name=name)
        return _caches_of(state, with_row), records

    def _step(self, weights: NestedMap, state: NestedMap) -> tuple[NestedMap, NestedMap]:
        """Returns the state after one token more, and what the step chose."""
        kind, state = self.kind, NestedMap(state)
        if kind.beam > 1:
            state.ancestor_BWT = _with_own_slot(state)
        view = next_token_view(state, kind.beam)
        mask_BL = tf.broadcast_to(state.is_active_B[:, None], state.ids_BW.shape)
        x_BWM, state.caches, weights_BNWK = self.model.extend(
            weights, state.ids_BW, mask_BL, view, state.caches, state.get("memory")
        )
        logits_BWV = self.model.next_logits(weights, x_BWM)
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
    """Returns the state of a single row with changed caches; any other state as it is."""
    state = NestedMap(state)
    if state.ids_BW.shape[0] == 1:
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
