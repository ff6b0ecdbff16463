"""VocabularyTrainer: trains vocabularies on first use and caches them by content."""

import hashlib
import io
import json
import logging
from collections.abc import Mapping, Sequence

import numpy as np
import sentencepiece

from lingvo_gshard.core import user_cache
from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.data.batching import mixing
from lingvo_gshard.data.batching.packing import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.data.vocabulary import Vocabulary

_log = logging.getLogger(__name__)

_MODEL_TYPES = ("unigram", "bpe")
# The number of threads affects the result, since each thread sums its own floats.
_TRAINING_THREADS = 2


class VocabularyTrainer(Configurable):
    """Trains the vocabularies of source and target, or loads them from the cache."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("joint", True, "Whether source and target share one vocabulary.")
        p.define(
            "size", 8000, "Number of ids of the joint vocabulary, or of the source's.", minimum=1
        )
        p.define(
            "target_size", 0, "Number of ids of the target's, unless joint; 0: `size`.", minimum=0
        )
        p.define("model_type", "unigram", "'unigram' or 'bpe'.")
        p.define(
            "character_coverage",
            0.9999,
            "Share of the text's characters with pieces.",
            above=0,
            maximum=1,
        )
        p.define("byte_fallback", True, "Whether other characters are spelled as UTF-8 bytes.")
        p.define(
            "max_sentences",
            200_000,
            "Largest number of distinct sentences to train on. Of more, languages are sampled with "
            "the input's temperature.",
            minimum=1,
        )
        p.define(
            "cache_directory",
            "",
            "Directory of trained vocabularies; '': lingvo_gshard in $XDG_CACHE_HOME or ~/.cache.",
        )
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        p = self.p
        if p.model_type not in _MODEL_TYPES:
            raise ValueError(
                f"input.vocabulary.model_type cannot be {p.model_type!r}. "
                f"{names.nearest(p.model_type, _MODEL_TYPES)}"
            )
        if p.joint and p.target_size:
            raise ValueError("input.vocabulary.target_size needs vocabulary.joint = False")

    def train(self, rows: Sequence[Row], temperature: float) -> tuple[Vocabulary, Vocabulary]:
        """Returns the vocabularies of source and target; the same object twice if they are joint.

        The same rows and Params give the same vocabularies.

        Args:
          rows: training rows.
          temperature: of the sampling of languages.

        Raises:
          ValueError: the text is too small for the size.
        """
        p = self.p
        sources = _by_language(rows)
        targets = {"": sorted({row.target for row in rows})}
        if p.joint:
            joint = self.train_on(sources | targets, temperature)
            return joint, joint
        return (
            self._train_or_load("vocabulary.size", sources, p.size, temperature),
            self._train_or_load(
                "vocabulary.target_size", targets, p.target_size or p.size, temperature
            ),
        )

    def train_on(self, sentences: Mapping[str, Sequence[str]], temperature: float) -> Vocabulary:
        """Returns a vocabulary trained on sentences by language. Raises the errors of `train`."""
        return self._train_or_load("vocabulary.size", sentences, self.p.size, temperature)

    def _train_or_load(
        self, path: str, sentences: Mapping[str, Sequence[str]], size: int, temperature: float
    ) -> Vocabulary:
        chosen = _sample(sentences, self.p.max_sentences, temperature)
        options = self._options(size)
        key = _content_key(chosen, options)
        directory = user_cache.directory("vocabularies", self.p.cache_directory)
        try:
            return Vocabulary.load(directory, key)
        except (OSError, ValueError):
            _log.info("Training a vocabulary of %d on %d sentences", size, len(chosen))
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(chosen), model_writer=model, minloglevel=2, **options
            )
        except RuntimeError as error:
            raise ValueError(
                f"input.{path} = {size} does not suit the training text of {len(chosen)} "
                f"sentences: {error}"
            ) from None
        vocabulary = Vocabulary(model.getvalue())
        try:
            vocabulary.save(directory, key)
        except OSError as error:
            _log.warning("The vocabulary is not cached in %s: %s", directory, error)
        return vocabulary

    def _options(self, size: int) -> dict[str, object]:
        return {
            "vocab_size": size,
            "model_type": self.p.model_type,
            "character_coverage": self.p.character_coverage,
            "byte_fallback": self.p.byte_fallback,
            # Cleaning has normalized the text already.
            "normalization_rule_name": "identity",
            "num_threads": _TRAINING_THREADS,
            "pad_id": PAD_ID,
            "bos_id": BOS_ID,
            "eos_id": EOS_ID,
            "unk_id": UNK_ID,
        }


def _by_language(rows: Sequence[Row]) -> dict[str, list[str]]:
    unique: dict[str, set[str]] = {}
    for row in rows:
        unique.setdefault(row.language, set()).add(row.source)
    return {language: sorted(unique[language]) for language in sorted(unique)}


def _sample(sentences: Mapping[str, Sequence[str]], most: int, temperature: float) -> list[str]:
    """Returns at most `most` distinct sentences, with languages sampled by temperature."""
    counts = [len(lines) for lines in sentences.values()]
    if sum(counts) <= most:
        return [line for lines in sentences.values() for line in lines]
    shares = mixing.temperature_probabilities(counts, temperature)
    chosen = []
    for index, lines in enumerate(sentences.values()):
        quota = min(len(lines), int(shares[index] * most))
        order = mixing.permutation(len(lines), index)[:quota]
        chosen += [lines[i] for i in np.sort(order)]
    return chosen


def _content_key(sentences: Sequence[str], options: Mapping[str, object]) -> str:
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    digest.update(sentencepiece.__version__.encode())
    for sentence in sentences:
        digest.update(sentence.encode("utf-8") + b"\n")
    return digest.hexdigest()[:32]
