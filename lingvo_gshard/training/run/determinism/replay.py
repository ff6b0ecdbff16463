"""Replays steps of a run from a checkpoint, and compares them with what the run recorded.

metrics.jsonl has the loss, the norm of the gradient and all other metrics of each step as the exact
float32 that the step computed, and a digest of its batch. A checkpoint has digests of all arrays.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping

import numpy as np

from lingvo_gshard.data.batching.packing import PackedBatch
from lingvo_gshard.data.input import Batch
from lingvo_gshard.training.run.checkpoint import arrays as checkpoint_arrays
from lingvo_gshard.training.run.checkpoint.parts import IN_RUN_RECORD
from lingvo_gshard.training.run.checkpoint.run_item import RunRecord
from lingvo_gshard.training.run.monitoring.metrics import BATCH_DIGEST, Row
from lingvo_gshard.training.run.roll_back import BatchesWithoutSkipped
from lingvo_gshard.training.run.runtime_protocol import Runtime


def batch_digest(batch: Batch) -> int:
    """Returns a CRC-32 of names, shapes, types and values of a batch's arrays.

    If each process has only its own rows of a batch, the batch has a digest of its own, which is
    the same in all processes.
    """
    if isinstance(batch, PackedBatch) and batch.digest is not None:
        return batch.digest
    digest = 0
    for name, value in sorted(batch.items()):
        array = np.ascontiguousarray(value)
        digest = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), digest)
        digest = zlib.crc32(array.reshape(-1).view(np.uint8).data, digest)
    return digest


# Shown first, since they are the step's result.
_FIRST = ("loss", "gradient_norm")


@dataclasses.dataclass
class Replayed:
    """The result of a replay.

    Attributes:
      step: the step that was asked for.
      checkpoint: the step of the checkpoint that it began from.
      differs_at: the first step that differs from what was recorded; None if all are equal.
      differences: how it differs, in words; empty if all are equal.
      compared: what was compared for `step`, in words.
    """

    step: int
    checkpoint: int
    differs_at: int | None = None
    differences: list[str] = dataclasses.field(default_factory=list)
    compared: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether everything that was compared is equal."""
        return self.differs_at is None


def replay(
    runtime: Runtime,
    batches: BatchesWithoutSkipped,
    recorded: Mapping[int, Row],
    found: Replayed,
    saved: RunRecord | None,
) -> None:
    """Takes the steps from a checkpoint to the one that was asked for, and compares them.

    Args:
      runtime: has the state of the checkpoint.
      batches: the batches after it.
      recorded: step -> the metrics that the run recorded.
      found: names the steps; receives what was found.
      saved: the record of the checkpoint of the step, if there is one. Without it, the loss of the
        step after it tells whether the weights are equal.
    """
    for step in range(found.checkpoint + 1, found.step + 1):
        row = _take_step(runtime, batches)
        found.differences = _row_differences(row, recorded.get(step, {}))
        if found.differences:
            found.differs_at = step
            return
    found.compared = _words(row, recorded[found.step])
    if saved is not None:
        wrong = _state_differences(runtime, saved)
        found.compared.append(f"the digests of all arrays of the checkpoint of step {found.step:,}")
    else:
        wrong = _differences_of_next(runtime, batches, recorded, found)
    if wrong:
        found.differs_at, found.differences = found.step, wrong


def _differences_of_next(
    runtime: Runtime, batches: BatchesWithoutSkipped, recorded: Mapping[int, Row], found: Replayed
) -> list[str]:
    """Returns how the loss of the next step differs, which its weights alone decide."""
    after = recorded.get(found.step + 1)
    if after is None:
        return []
    row = _take_step(runtime, batches)
    found.compared.append(f"the weights, by the loss of step {found.step + 1:,}")
    wrong = _row_differences(row, {name: after[name] for name in _FIRST})
    return [f"of step {found.step + 1:,}, the {text}" for text in wrong]


def _take_step(runtime: Runtime, batches: BatchesWithoutSkipped) -> Row:
    batch = next(batches)
    row = runtime.train_step(batch).read()
    return {**row, BATCH_DIGEST: float(batch_digest(batch))}


def _row_differences(row: Row, recorded: Row) -> list[str]:
    """Returns how a step differs from its record, the batch first."""
    names = [BATCH_DIGEST, *_FIRST, *row]
    wrong = [
        name
        for name in dict.fromkeys(names)
        if name in recorded and name in row and not _is_same(row[name], recorded[name])
    ]
    if BATCH_DIGEST in wrong:
        return ["its batch is another one"]
    shown = [f"{name} is {row[name]!r}, and {recorded[name]!r} was recorded" for name in wrong[:2]]
    return [*shown, f"{len(wrong) - 2:,} more metrics differ"] if len(wrong) > 2 else shown


def _state_differences(runtime: Runtime, saved: RunRecord) -> list[str]:
    """Returns which arrays of the state have other digests than the checkpoint's."""
    wrong = []
    for part, tree in runtime.state().items():
        if part in IN_RUN_RECORD or part not in saved.digests:
            continue
        found = checkpoint_arrays.digests(dict(tree.flatten_items()))
        expected = saved.digests[part]
        wrong += [f"{part}.{path}" for path in found if found[path] != expected.get(path)]
    if not wrong:
        return []
    more = f" and {len(wrong) - 3:,} more" if len(wrong) > 3 else ""
    return [f"other digests than in the checkpoint: {', '.join(wrong[:3])}{more}"]


def _words(row: Row, recorded: Row) -> list[str]:
    common = [name for name in row if name in recorded and name != BATCH_DIGEST]
    others = [name for name in common if name not in _FIRST]
    words = ["batch"] if BATCH_DIGEST in recorded else []
    words += [f"{name.replace('_', ' ')} {row[name]:.7g}" for name in _FIRST]
    return [*words, f"{len(others):,} more metrics"] if others else words


def _is_same(one: float, other: float | None) -> bool:
    # A value that is not finite is recorded as null.
    if other is None:
        return one - one != 0
    return one == other
