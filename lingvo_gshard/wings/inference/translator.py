"""Translator: translates sentences with an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_gshard.core import SILENT, Progress, UserError
from lingvo_gshard.data import Vocabulary
from lingvo_gshard.wings.inference.engine.engine import Engine
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.requests import Hypothesis, Request
from lingvo_gshard.wings.inference.text import continuation, stop_check
from lingvo_gshard.wings.preparation.cleaning.normalization import Normalizer


@dataclasses.dataclass(frozen=True)
class Translation:
    """One translation of a sentence.

    Attributes:
      score: ranks translations; see `wings/inference/decoding/beam.py`.
      pieces: the text of each token, `▁` for a space.
      log_probabilities: the log-probability of each token, and of the end if the model ended the
        translation.
      reason: why the translation ended: "end", "length" or "stop".
      seed: the seed that drew the translation; None if it was searched.
    """

    text: str
    score: float
    pieces: tuple[str, ...]
    log_probabilities: tuple[float, ...]
    reason: str
    seed: int | None


@dataclasses.dataclass(frozen=True)
class Translations:
    """Translations of some sentences.

    Attributes:
      texts: the best translation of each sentence.
      cut: indices of the sentences that were too long and lost their end.
      best: the `DecodingOptions.best` translations of each sentence, the best first; none of an
        empty sentence.
    """

    texts: list[str]
    cut: tuple[int, ...]
    best: list[list[Translation]]


class Translator:
    """Translates sentences. Sentences are normalized and encoded as in training."""

    # As in `Decoding`.
    HAS_SOURCE = True

    def __init__(
        self,
        engine: Engine,
        source_vocabulary: Vocabulary,
        target_vocabulary: Vocabulary,
        options: DecodingOptions | None = None,
    ):
        """Prepares to translate."""
        self.engine, self._options = engine, options or DecodingOptions()
        self._source_vocabulary = source_vocabulary
        self._target_vocabulary = target_vocabulary

    @property
    def longest(self) -> int:
        """The number of tokens, all around a sentence counted, beyond which it is cut."""
        return self.engine.facts.most_source

    @property
    def longest_text(self) -> int:
        """`longest` without the ids around a sentence."""
        return self.longest - len(self._source_vocabulary.source_start) - 1

    def translate(
        self,
        sentences: Sequence[str],
        progress: Progress = SILENT,
        options: DecodingOptions | None = None,
        prefixes: Sequence[str] = (),
    ) -> Translations:
        """Returns the translations, in the order of the sentences.

        Args:
          sentences: one text each; an empty one has an empty translation.
          options: options of the search; None takes the translator's options.
          prefixes: what each translation must begin with; empty for no prefixes.
        """
        encoded = self.encode(sentences)
        prefixes = prefixes or [""] * len(encoded)
        if len(prefixes) != len(encoded):
            raise UserError(f"{len(prefixes)} prefixes were given for {len(encoded)} sentences")
        cut = tuple(i for i, ids in enumerate(encoded) if len(ids) > self.longest_text)
        # Long sentences first: those that are decoded last, in few rows, then end soon.
        order = sorted((i for i, ids in enumerate(encoded) if ids), key=lambda i: -len(encoded[i]))
        requests = [self.request(encoded[i], options, prefixes[i]) for i in order]
        answers = self.engine.submit_all(requests)
        best: list[list[Translation]] = [[] for _ in sentences]
        for done, (index, answer) in enumerate(zip(order, answers, strict=True), start=1):
            best[index] = self.translations(answer.request, answer.result())
            progress.update(len(sentences) - len(order) + done)
        if not order:
            progress.update(len(sentences))
        return Translations([found[0].text if found else "" for found in best], cut, best)

    def encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """Returns the source tokens of each sentence, without the end."""
        normal = Normalizer()
        return self._source_vocabulary.encode_batch([normal(text) for text in sentences])

    def request(
        self, ids: Sequence[int], options: DecodingOptions | None = None, prefix: str = ""
    ) -> Request:
        """Returns the request for the translation of one sentence.

        Args:
          ids: source tokens, without the end. Tokens beyond the model's limit are cut.
          options: options of the search; None takes the translator's options.
          prefix: what the translation must begin with.
        """
        options, vocabulary = options or self._options, self._target_vocabulary
        source = self._source_vocabulary
        given = (*vocabulary.target_start, *(vocabulary.encode(prefix) if prefix else ()))
        if vocabulary.forbidden_ids:
            forbidden = (*options.forbidden_tokens, *vocabulary.forbidden_ids)
            options = dataclasses.replace(options, forbidden_tokens=forbidden)
        return Request(
            source=(*source.source_start, *ids[: self.longest_text], source.eos_id),
            given=given,
            options=options,
            should_stop=stop_check(vocabulary, given, options),
        )

    def translations(self, request: Request, hypotheses: Sequence[Hypothesis]) -> list[Translation]:
        """Returns the texts of the hypotheses that answer a request."""
        vocabulary, normal = self._target_vocabulary, Normalizer()
        prefix, stop = vocabulary.text_of(request.given), request.options.stop

        def text(tokens: Sequence[int]) -> str:
            return normal(prefix + continuation(vocabulary, request.given, tokens, stop))

        return [
            Translation(
                text(found.tokens),
                found.score,
                tuple(map(vocabulary.piece, found.tokens)),
                found.log_probabilities,
                found.reason,
                request.seed,
            )
            for found in hypotheses
        ]
