"""Input: where an experiment's batches come from."""

from __future__ import annotations

import abc
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from lingvo_gshard.core import SILENT, Configurable, Params, Progress, UserError, tf
from lingvo_gshard.core.token_kinds import TokenKinds
from lingvo_gshard.data.batching.packing import BOS_ID, EOS_ID, PAD_ID, Batch
from lingvo_gshard.data.sources.report import CleaningReport

# Compiled steps count the tokens of a batch in 32 bits.
_MOST_NUMBERS = 2**31 - 1


def check_sizes(specs: Mapping[str, tf.TensorSpec]) -> None:
    """Checks the size of each array of a batch, from its shape.

    Raises:
      UserError: an array is larger than any step can be compiled for.
    """
    for name, spec in specs.items():
        count = math.prod(size or 1 for size in spec.shape.as_list()) if spec.shape.rank else 1
        if count > _MOST_NUMBERS:
            raise UserError(
                f"input: a batch has {name} of {spec.shape.as_list()}, {count:,} numbers; a step "
                f"takes at most {_MOST_NUMBERS:,}. Lower input.batch_rows, or the length of rows "
                "(input.length, input.source_length, input.target_length)"
            )


class TrainBatches(Protocol):
    """An endless iterator over training batches whose position can be saved and restored."""

    def __next__(self) -> Batch:
        """Returns the next batch."""
        ...

    def get_state(self) -> Any:
        """Returns the position after the last batch, as JSON values."""
        ...

    def set_state(self, state: Any) -> None:
        """Moves to a saved position: the batches after it follow again."""
        ...

    def close(self) -> None:
        """Stops background work."""
        ...


@dataclasses.dataclass(frozen=True)
class TextIds:
    """The ids around the texts that a model generates.

    Attributes:
      before: ids before the first token to generate; one at least.
      ends: ids that end a text; one at least.
      pad: id in padding, where callers of an exported program give a batch of texts.
    """

    before: tuple[int, ...] = (BOS_ID,)
    ends: tuple[int, ...] = (EOS_ID,)
    pad: int = PAD_ID


class Input(Configurable, abc.ABC):
    """Makes the batches of an experiment, split by split.

    A new input must define `batch_specs`, `train_batches` and `evaluation_batches`. Constructing an
    input reads no data; the first call that needs data reads it.

    Attributes:
      own_rows: returns which rows of a training batch with given specs this process needs, bool
        [B]; None if it needs all. An input may leave the tokens of other rows out.
    """

    progress: Progress = SILENT
    own_rows: Callable[[Mapping[str, tf.TensorSpec]], np.ndarray] | None = None

    @classmethod
    @abc.abstractmethod
    def batch_specs(cls, params: Params) -> dict[str, tf.TensorSpec]:
        """Returns the shape and dtype of each array of a batch, without reading data."""

    @classmethod
    def declared_batches(cls, params: Params) -> Sequence[Mapping[str, tf.TensorSpec]]:
        """Returns the shapes that batches may have, one dict of specs for each.

        A step is compiled for each of these shapes without a warning. The default returns only
        `batch_specs`. An input with buckets of lengths returns one dict for each bucket. A
        dimension of None stands for any size.
        """
        return [cls.batch_specs(params)]

    @classmethod
    def rows_per_batch(cls, params: Params) -> int | None:
        """Returns the size of the first dimension of a batch's arrays; None if unknown."""
        return next(iter(cls.batch_specs(params).values())).shape[0]

    @classmethod
    def configured_vocabulary_sizes(cls, params: Params) -> Mapping[str, int]:
        """Returns name of a vocabulary -> number of its ids that the Params ask for.

        Planning and benchmarks use these sizes, since they read no data. A vocabulary trained on
        little text may turn out smaller. The default is no vocabulary.
        """
        del params
        return {}

    def vocabulary_sizes(self) -> Mapping[str, int]:
        """Returns name of a vocabulary -> number of its ids; the default is no vocabulary."""
        return {}

    @property
    def text_ids(self) -> TextIds:
        """The ids around a text."""
        return TextIds()

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that exist. Training measures the loss of "dev" if there is one."""
        return ("train",)

    @property
    def report(self) -> CleaningReport | None:
        """The report on cleaning the training rows; None for data that is not cleaned."""
        return None

    @property
    def notes(self) -> list[str]:
        """Lines about the data that a user should know before training; the default is none."""
        return []

    def usage_notes(self) -> list[str]:
        """Returns lines about what training has read so far; the default is none."""
        return []

    def check_split(self, split: str) -> None:
        """Reads a split in full so that bad data is reported before training starts.

        Raises:
          UserError: the split cannot be read.
        """

    @abc.abstractmethod
    def train_batches(self, seed: int) -> TrainBatches:
        """Returns the endless iterator of training batches for a seed."""

    def token_kinds(self, batch: Batch) -> TokenKinds | None:
        """Returns what watched routers count the tokens of a training batch by.

        The default is None: they do not, unless the input packs rows of known languages.
        """
        del batch
        return None

    @abc.abstractmethod
    def evaluation_batches(self, split: str) -> Iterator[Batch]:
        """Yields the batches of a split once, always in the same order."""

    def save_vocabularies(self, directory: str | os.PathLike) -> None:
        """Writes the vocabularies into a directory of a checkpoint."""

    def load_vocabularies(self, directory: str | os.PathLike) -> None:
        """Replaces the vocabularies by those that `save_vocabularies` wrote."""
