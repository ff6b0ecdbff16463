"""PreferenceInput: packs pairs of a chosen and a rejected answer to one prompt."""

from __future__ import annotations

import json

import numpy as np

from lingvo_gshard.core import Params, UserError, tf
from lingvo_gshard.data import MemoryTable, Row, mixture_plan, packing
from lingvo_gshard.wings.fine_tuning.conversations.conversation_input import ConversationInput
from lingvo_gshard.wings.fine_tuning.conversations.encoding import Encoded, Encoder
from lingvo_gshard.wings.fine_tuning.conversations.examples import pair_of
from lingvo_gshard.wings.fine_tuning.conversations.reader import PreferenceReader

# Marks of the tokens of a pair, which one table has as one text: the lowest bit of a mark says
# whether the token counts in the loss.
_REJECTED = 2
_BETWEEN = 4


class PreferenceInput(ConversationInput):
    """Reads pairs of answers and packs them for direct preference optimization.

    Pair n of a row, counted from 1, has its chosen text in segment 2n - 1 and its rejected text in
    segment 2n. `target_marks` is 1 for the tokens of answers. `pairs` [B,S] is 1 for each pair of a
    row.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.set(corpus=PreferenceReader.params())
        p.define("pairs_per_row", 16, "S: largest number of pairs of a row.", minimum=1)
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        if self.p.truncate:
            raise UserError(
                "input.truncate is True; False was expected: a pair loses its second answer first"
            )

    @classmethod
    def buckets_of(cls, params: Params) -> list[mixture_plan.Bucket]:
        """Returns the one bucket. Each pair takes one of the places of the source."""
        return [(params.batch_rows, params.pairs_per_row, params.length)]

    @classmethod
    def specs_of(cls, bucket: mixture_plan.Bucket) -> dict[str, tf.TensorSpec]:
        return {**super().specs_of(bucket), "pairs": tf.TensorSpec(bucket[:2], tf.int32)}

    def cut(self, rows: np.ndarray, lengths: np.ndarray) -> mixture_plan.Pieces:
        sizes = np.stack([np.ones(len(rows), np.int64), lengths[:, 1] - 1], axis=1)
        return mixture_plan.Pieces(rows, np.ones(len(rows), np.int64), sizes)

    def _encode(self, encoder: Encoder, row: Row) -> Encoded:
        chosen, rejected = map(encoder.encode, pair_of(json.loads(row.target)))
        if not (chosen.counts.any() and rejected.counts.any()):
            return Encoded(chosen.ids, np.zeros_like(chosen.counts))
        marks = rejected.counts + _REJECTED
        # The first token of the rejected text is predicted by nothing.
        marks[0] = _BETWEEN
        return Encoded(
            np.concatenate([chosen.ids, rejected.ids]), np.concatenate([chosen.counts, marks])
        )

    def _table_of(self, kept: list[Encoded]) -> MemoryTable:
        table = super()._table_of(kept)
        one_each = packing.Tokens.concatenate([[0]] * len(kept))
        return MemoryTable(one_each, table.targets, [""] * len(kept), table.marks)

    def _finish(self, batch: packing.Batch) -> packing.Batch:
        """Returns a batch whose pairs have two segments each."""
        marks_BL, segments_BL = batch["target_marks"], batch["target_segments"]
        column_L = np.arange(marks_BL.shape[1])
        is_between_BL = marks_BL == _BETWEEN
        is_rejected_BL = (marks_BL & _REJECTED) != 0
        # The place of the last token between the texts of a pair, at or before each position.
        between_BL = np.maximum.accumulate(np.where(is_between_BL, column_L, -1), axis=1)
        positions_BL = np.where(
            is_rejected_BL, column_L - between_BL - 1, batch["target_positions"]
        )
        pairs_of_row_B = segments_BL.max(axis=1, initial=0)
        places_S = np.arange(self.p.pairs_per_row)
        segments_BL = np.where(segments_BL > 0, 2 * segments_BL - 1 + is_rejected_BL, 0)
        changed = {
            "target_segments": segments_BL,
            "target_positions": positions_BL,
            "target_marks": marks_BL & 1,
            "target_inputs": batch["target_inputs"],
            "target_labels": batch["target_labels"],
        }
        arrays = {
            name: np.where(is_between_BL, 0, array).astype(np.int32)
            for name, array in changed.items()
        }
        arrays["pairs"] = (places_S < pairs_of_row_B[:, None]).astype(np.int32)
        return arrays
