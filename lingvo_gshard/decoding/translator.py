"""Translator: translates sentences in batches of similar length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from lingvo_gshard.core import context
from lingvo_gshard.core.bound_function import WeightsHolder
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.data.batching.decoding_batches import decoding_batches
from lingvo_gshard.data.sources.cleaning import Normalizer
from lingvo_gshard.data.vocabulary import Vocabulary
from lingvo_gshard.decoding.beam import beam_decode
from lingvo_gshard.decoding.greedy import greedy_decode
from lingvo_gshard.decoding.models import TranslationModel

LENGTHS = (32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Translations:
    """Translations of some sentences.

    Attributes:
      texts: the translation of each sentence.
      cut: indices of the sentences that were too long and lost their end.
    """

    texts: list[str]
    cut: tuple[int, ...]


class Translator:
    """Translates sentences with one model.

    A sentence goes to the bucket of the smallest of `lengths` that holds its source tokens and EOS.
    Each bucket is one shape and compiles once. A translation has at most 2 n + 10 tokens for n
    source tokens, and at most twice the length of its bucket.
    """

    def __init__(
        self,
        task: TranslationModel,
        runtime: WeightsHolder,
        source_vocabulary: Vocabulary,
        target_vocabulary: Vocabulary,
        lengths: Sequence[int] = LENGTHS,
        batch_tokens: int = 4096,
        beam_size: int = 1,
        length_exponent: float = 1.0,
    ):
        """Prepares to translate; nothing is compiled yet.

        Args:
          task: the model.
          runtime: holds the model's weights.
          source_vocabulary: encodes sentences.
          target_vocabulary: decodes translations.
          lengths: source lengths of the buckets.
          batch_tokens: source positions of a batch; a bucket of length L has batch_tokens // L
            rows. Small values suit single sentences, large ones many.
          beam_size: hypotheses kept for each sentence; 1 is greedy decoding.
          length_exponent: how strongly long hypotheses are favored, see `beam_decode`; 0 disables
            it.

        Raises:
          ValueError: `beam_size` is less than 1 or more than the tokens to choose from.
        """
        if not 1 <= beam_size <= target_vocabulary.size:
            raise ValueError(
                f"--beam_size={beam_size}: 1 to {target_vocabulary.size:,} was expected, the size "
                "of the vocabulary"
            )
        self._task = task
        self._source_vocabulary = source_vocabulary
        self._target_vocabulary = target_vocabulary
        self._positions = task.max_positions
        self._lengths = [n for n in lengths if n <= self._positions] or [self._positions]
        self._batch_tokens = batch_tokens
        self._beam_size = beam_size
        self._length_exponent = length_exponent
        self._decoder = runtime.bind_weights(self._decode)

    @property
    def compile_count(self) -> int:
        """The number of buckets compiled so far."""
        return self._decoder.compile_count

    @property
    def longest(self) -> int:
        """The number of source tokens, EOS counted, beyond which a sentence is cut."""
        return max(self._lengths)

    def translate(
        self, sentences: Sequence[str], on_progress: Callable[[int], None] | None = None
    ) -> Translations:
        """Returns the translations, in the order of the sentences.

        Args:
          sentences: one text each; an empty one has an empty translation.
          on_progress: called after each batch with the number of sentences done.
        """
        normal = Normalizer()
        normalized = [normal(sentence) for sentence in sentences]
        present = [index for index, text in enumerate(normalized) if text]
        batches = decoding_batches(
            [normalized[index] for index in present],
            self._source_vocabulary,
            self._lengths,
            self._batch_tokens,
        )
        results = []
        done = len(sentences) - len(present)
        for batch in batches:
            results.append(self._translate_batch(batch.arrays["source_ids"]))
            done += int(np.count_nonzero(batch.indices >= 0))
            if on_progress:
                on_progress(done)
        texts = [""] * len(sentences)
        for index, text in zip(present, batches.in_order(results), strict=True):
            texts[index] = normal(text)
        return Translations(texts, tuple(present[index] for index in batches.cut))

    def _translate_batch(self, ids_BK: np.ndarray) -> list[str]:
        output_BL = self._decoder(ids_BK)
        return [self._target_vocabulary.decode(row.tolist()) for row in output_BL]

    def _decode(self, theta: NestedMap, ids_BK: tf.Tensor) -> tf.Tensor:
        vocabulary = self._target_vocabulary
        max_length = min(2 * ids_BK.shape[1], self._positions)
        tokens_B = tf.reduce_sum(tf.cast(tf.not_equal(ids_BK, 0), tf.int32), axis=1)
        arguments = (
            self._task,
            theta,
            ids_BK,
            max_length,
            vocabulary.bos_id,
            vocabulary.eos_id,
            2 * tokens_B + 10,
        )
        with context.scope(training=False):
            if self._beam_size == 1:
                return greedy_decode(*arguments)
            return beam_decode(*arguments, self._beam_size, self._length_exponent)
