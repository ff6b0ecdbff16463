"""VocabularyTrainer: trains vocabularies on first use and caches them by content."""

from __future__ import annotations

import collections
import hashlib
import io
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import sentencepiece

from lingvo_gshard.core import SILENT, Configurable, Params, Progress, UserError, cached, explained
from lingvo_gshard.data import Row, Vocabulary, packing, permutation, rows_by_language, stages
from lingvo_gshard.wings.preparation.cleaning.normalization import NFC, NFKC
from lingvo_gshard.wings.preparation.mixing import temperature_probabilities
from lingvo_gshard.wings.preparation.vocabularies.others import of_others, paths_of

_log = logging.getLogger(__name__)

_MODEL_TYPES = ("unigram", "bpe")
# The number of threads affects the result, since each thread sums its own floats.
_TRAINING_THREADS = 2
_SPECIAL_IDS = len((packing.PAD_ID, packing.BOS_ID, packing.EOS_ID, packing.UNK_ID))
_BYTES = 256
# Pieces of several characters make sentences short. Of a real corpus in 52 languages, a third of
# the ids for single characters gave fewer tokens than a fifth, a half or two thirds.
_LARGEST_SHARE_OF_CHARACTERS = 1 / 3
# SentencePiece skips longer lines, in bytes, unless told otherwise.
_LONGEST_LINE = 4192
# It trains best on lines that are no longer than sentences, in characters.
_LONGEST_PIECE = 1000
# SentencePiece refuses less.
_LEAST_COVERAGE = 0.98


class VocabularyTrainer(Configurable):
    """Trains the vocabularies of source and target, or loads them from the cache.

    Attributes:
      unicode_form: "NFC" or "NFKC". A vocabulary trained for NFKC converts all texts to it.
      notes: lines about vocabularies that are not as the Params ask for.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("joint", True, "Whether source and target share one vocabulary.")
        p.define("size", 8000, "Ids of the joint vocabulary, or of the source's.", minimum=1)
        p.define("target_size", 0, "Ids of the target's, unless joint; 0: `size`.", minimum=0)
        p.define(
            "files",
            (),
            "Vocabularies of others, used as they are: a SentencePiece model or a tokenizer.json, "
            "or the directory of a published model, for both sides; or one for the source and one "
            "for the target; (): trained here.",
        )
        p.define(
            "end_token",
            "",
            "Token that ends a text, of a tokenizer.json in `files`; '': a known one.",
        )
        p.define(
            "begin_token", "", "Token that begins a text, of a tokenizer.json; '': a known one."
        )
        p.define("model_type", "unigram", "'unigram' or 'bpe'.", choices=_MODEL_TYPES)
        p.define(
            "character_coverage",
            0.9999,
            "Share of the text's characters with pieces of their own. With byte_fallback it is "
            "lowered if these characters would take more than a third of the ids.",
            minimum=_LEAST_COVERAGE,
            maximum=1,
        )
        p.define("byte_fallback", True, "Whether other characters are spelled as UTF-8 bytes.")
        p.define(
            "max_characters",
            2_000_000,
            "Largest number of characters to train on. Of more, sentences are sampled, languages "
            "with the input's temperature, and training starts from fewer candidates.",
            minimum=1,
        )
        p.define(
            "cache_directory",
            "",
            "Directory of trained vocabularies; '': lingvo_gshard in $XDG_CACHE_HOME or ~/.cache.",
            changes_results=False,
        )
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        p = self.p
        count = len(paths_of(p.files))
        if count > (1 if p.joint else 2):
            raise UserError(
                f"input.vocabulary.files names {count} files; one was expected, or two with "
                "vocabulary.joint = False"
            )
        for name in ("end_token", "begin_token"):
            if p.get(name) and not p.files:
                raise UserError(
                    f"input.vocabulary.{name} is {p.get(name)!r}, but input.vocabulary.files has "
                    "no tokenizer.json"
                )
        if p.joint and p.target_size:
            raise UserError("input.vocabulary.target_size needs vocabulary.joint = False")
        self.unicode_form = NFC
        self.progress: Progress = SILENT
        self.notes: list[str] = []

    def train(self, rows: Sequence[Row], temperature: float) -> tuple[Vocabulary, Vocabulary]:
        """Returns the vocabularies of source and target; the same object twice if they are joint.

        The same rows and Params give the same vocabularies.

        Raises:
          UserError: the size is too small, there is no text, or a file of others is no vocabulary.
        """
        p = self.p
        if p.files:
            found = _of_others(p)
            return found[0], found[-1]
        by_language = sorted(rows_by_language(rows).items())
        sources = {language: sorted({row.source for row in own}) for language, own in by_language}
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
        if self.p.files:
            return _of_others(self.p)[0]
        return self._train_or_load("vocabulary.size", sentences, self.p.size, temperature)

    def train_on_documents(self, rows: Sequence[Row], temperature: float) -> Vocabulary:
        """Returns a vocabulary trained on the lines of documents, all as one language."""
        return self.train_on({"": lines_of(rows)}, temperature)

    @staticmethod
    def coverage_notes(rows: Sequence[Row], source: Vocabulary, target: Vocabulary) -> list[str]:
        """Returns lines about the languages that the vocabularies write with most tokens."""
        return list(filter(None, map(to_note, of_rows(rows, source, target).values())))

    @classmethod
    def configured_sizes(cls, params: Params) -> tuple[int, int]:
        """Returns the sizes of source and target vocabulary that Params ask for."""
        if params.files:
            found = _of_others(params)
            return found[0].size, found[-1].size
        return params.size, params.target_size or params.size

    def _train_or_load(
        self, path: str, sentences: Mapping[str, Sequence[str]], size: int, temperature: float
    ) -> Vocabulary:
        all_characters = sum(len(line) for lines in sentences.values() for line in lines)
        options = self._options(size)
        if all_characters > self.p.max_characters:
            # SentencePiece's defaults are a million candidates and two iterations.
            options |= {"seed_sentencepiece_size": 10 * size, "num_sub_iterations": 1}
        chosen = _sample(sentences, self.p.max_characters, temperature)
        if not any(line.strip() for line in chosen):
            raise UserError(f"input.{path} = {size}: there is no text to train a vocabulary on")
        chosen = self._with_room(path, chosen, size)
        longest = max(len(line.encode("utf-8")) for line in chosen)
        if longest > _LONGEST_LINE:
            options["max_sentence_length"] = longest
        key = _content_key(chosen, options)
        directory = cached.directory("vocabularies", self.p.cache_directory)
        try:
            vocabulary = Vocabulary.load(directory, key)
        except (OSError, ValueError):
            vocabulary = self._train(path, chosen, options)
            try:
                vocabulary.save(directory, key)
            except OSError as error:
                is_file = isinstance(error, (FileExistsError, NotADirectoryError))
                reason = "a file; a directory was expected" if is_file else error.strerror
                _log.warning(
                    "The vocabulary is not kept for later runs in %s, %s: %s",
                    "input.vocabulary.cache_directory",
                    directory,
                    reason,
                )
        if vocabulary.size < size:
            word = "sentence" if len(chosen) == 1 else "sentences"
            self.notes.append(
                f"The vocabulary has {vocabulary.size:,} ids: the training text of {len(chosen):,} "
                f"{word} gives no more, though input.{path} = {size} allows them."
            )
        return vocabulary

    def _train(self, path: str, sentences: Sequence[str], options: Mapping[str, Any]) -> Vocabulary:
        size = options["vocab_size"]
        characters = sum(map(len, sentences))
        self.progress.begin(f"Training a vocabulary of {size:,} on {characters:,} characters")
        model = io.BytesIO()
        problem = (
            f"input.{path} = {size}: SentencePiece cannot train a vocabulary on the training text "
            f"of {len(sentences)} sentences. It says"
        )
        with explained(problem, RuntimeError):
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sentences), model_writer=model, minloglevel=2, **options
            )
        return Vocabulary(model.getvalue())

    def _with_room(self, path: str, sentences: list[str], size: int) -> list[str]:
        """Returns sentences without the rare characters that would take the room of other pieces.

        A rare character is replaced by a space, so that it gets no piece.
        """
        counts = collections.Counter("".join(sentences))
        # SentencePiece starts every sentence with a space.
        counts[" "] += len(sentences)
        ranked = counts.most_common()
        wanted = _covering([n for _, n in ranked], self.p.character_coverage)
        room = size - _SPECIAL_IDS - (_BYTES if self.p.byte_fallback else 0)
        most = min(int(size * _LARGEST_SHARE_OF_CHARACTERS), room)
        if most < 1 or (wanted > room and not self.p.byte_fallback):
            raise UserError(self._too_small(path, size, wanted))
        if wanted <= most or not self.p.byte_fallback:
            return sentences
        rare = {ord(character): " " for character, _ in ranked[most:]}
        covered = sum(n for _, n in ranked[:most]) / counts.total()
        self.notes.append(
            f"The {most:,} most frequent of {len(ranked):,} characters have pieces of their own "
            f"({covered:.2%} of the text); the others are spelled as bytes. input.{path} = "
            f"{_rounded_up(wanted / _LARGEST_SHARE_OF_CHARACTERS)} has room for {wanted:,}."
        )
        return [line.translate(rare) for line in sentences]

    def _too_small(self, path: str, size: int, characters: int) -> str:
        taken = f"{_SPECIAL_IDS} ids are special"
        if not self.p.byte_fallback:
            return (
                f"input.{path} = {size} is too small: {taken} and the text has {characters:,} "
                f"characters. Set it to at least {_rounded_up(3 * characters)}, or "
                "input.vocabulary.byte_fallback = True to spell rare characters as bytes"
            )
        least = _rounded_up(_SPECIAL_IDS + _BYTES + 3 * min(characters, _BYTES))
        return (
            f"input.{path} = {size} is too small: {taken} and {_BYTES} stand for bytes "
            f"(input.vocabulary.byte_fallback). Set it to at least {least}"
        )

    def _options(self, size: int) -> dict[str, object]:
        return {
            "vocab_size": size,
            "model_type": self.p.model_type,
            "character_coverage": self.p.character_coverage,
            "byte_fallback": self.p.byte_fallback,
            # Little text gives a smaller vocabulary.
            "hard_vocab_limit": False,
            # Cleaning has normalized the text already. With NFKC, texts to translate later are
            # normalized by the vocabulary.
            "normalization_rule_name": "nfkc" if self.unicode_form == NFKC else "identity",
            "num_threads": _TRAINING_THREADS,
            "pad_id": packing.PAD_ID,
            "bos_id": packing.BOS_ID,
            "eos_id": packing.EOS_ID,
            "unk_id": packing.UNK_ID,
        }


stages.INPUT_STAGES.register(stages.VOCABULARIES)(VocabularyTrainer)


def _of_others(params: Params) -> tuple[Vocabulary, ...]:
    return of_others(params.files, params.end_token, params.begin_token)


def _covering(counts: Sequence[int], share: float) -> int:
    """Returns how many of the characters, most frequent first, make up a share of a text."""
    reached = np.cumsum(counts) / sum(counts)
    return min(int(np.searchsorted(reached, share)) + 1, len(counts))


def _rounded_up(value: float) -> int:
    return -(-int(value) // 100) * 100


def lines_of(rows: Sequence[Row]) -> list[str]:
    """Returns the different lines of documents, the long ones cut, to train a vocabulary on."""
    lines = {line for row in rows for line in row.target.split("\n")}
    parts = {
        line[begin : begin + _LONGEST_PIECE]
        for line in lines
        for begin in range(0, len(line), _LONGEST_PIECE)
    }
    return sorted(parts)


def _sample(sentences: Mapping[str, Sequence[str]], most: int, temperature: float) -> list[str]:
    """Returns sentences of at most `most` characters, with languages sampled by temperature."""
    texts = [lines for lines in sentences.values() if lines]
    lengths = [np.fromiter(map(len, lines), np.int64, len(lines)) for lines in texts]
    if sum(int(length.sum()) for length in lengths) <= most:
        return [line for lines in texts for line in lines]
    shares = temperature_probabilities([len(lines) for lines in texts], temperature)
    chosen = []
    for index, lines in enumerate(texts):
        order = permutation(len(lines), index)
        taken = np.searchsorted(np.cumsum(lengths[index][order]), shares[index] * most, "right")
        chosen += [lines[i] for i in np.sort(order[:taken])]
    return chosen


def _content_key(sentences: Sequence[str], options: Mapping[str, object]) -> str:
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    digest.update(sentencepiece.__version__.encode())
    for sentence in sentences:
        digest.update(sentence.encode("utf-8") + b"\n")
    return digest.hexdigest()[:32]


TARGETS = "targets"
_ROWS_OF_A_LANGUAGE = 1000
_LISTED = 8
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# Is in the text of a byte-level piece that is only a part of a character.
_PART = "\ufffd"


# Name -> value of the measures of a vocabulary on the text of a language.
Coverage: TypeAlias = dict[str, float]


def coverage(vocabulary: Vocabulary, texts: Mapping[str, Sequence[str]]) -> dict[str, Coverage]:
    """Returns the coverage of each language, from language -> texts.

    White space does not count. `covered` is the share of the characters that are written with
    pieces, and not with bytes or as unknown. `tokens_per_word` is of no use for languages that do
    not separate words. Values are rounded to four digits after the point.
    """
    known: dict[str, bool] = {}
    return {
        language: _of_language(vocabulary, lines, known)
        for language, lines in sorted(texts.items())
    }


def _of_language(vocabulary: Vocabulary, lines: Sequence[str], known: dict[str, bool]) -> Coverage:
    counts = collections.Counter(character for line in lines for character in "".join(line.split()))
    new = [character for character in counts if character not in known]
    for character, ids in zip(new, vocabulary.encode_batch(new), strict=True):
        known[character] = not any(_is_no_piece(vocabulary, index) for index in ids)
    covered = sum(n for character, n in counts.items() if known[character])
    words = sum(len(line.split()) for line in lines)
    tokens = sum(map(len, vocabulary.encode_batch(lines)))
    return {
        "characters": counts.total(),
        "words": words,
        "tokens": tokens,
        "covered": round(covered / max(counts.total(), 1), 4),
        "tokens_per_character": round(tokens / max(counts.total(), 1), 4),
        "tokens_per_word": round(tokens / max(words, 1), 4),
    }


def _is_no_piece(vocabulary: Vocabulary, index: int) -> bool:
    if index == vocabulary.unk_id:
        return True
    piece = vocabulary.piece(index)
    return _PART in piece or bool(_BYTE.fullmatch(piece))


def of_rows(
    rows: Iterable[Row], source: Vocabulary, target: Vocabulary
) -> dict[str, dict[str, Coverage]]:
    """Returns how well the vocabularies write the first rows of each language.

    Returns:
      Side -> language -> coverage. The side is "joint" if the vocabularies are the same object,
      else "source" or "target". Targets of pairs are one language, TARGETS.
    """
    sources, targets = collections.defaultdict(list), collections.defaultdict(list)
    taken = collections.Counter()
    for row in rows:
        taken[row.language] += 1
        if taken[row.language] > _ROWS_OF_A_LANGUAGE:
            continue
        if row.source:
            sources[row.language].append(row.source)
        targets[TARGETS if row.source else row.language].append(row.target)
    if source is target:
        return {"joint": coverage(source, sources | targets)}
    return {"source": coverage(source, sources), "target": coverage(target, targets)}


def to_note(found: Mapping[str, Mapping[str, float]]) -> str:
    """Returns a line about the languages that a vocabulary writes with most tokens; "" for one."""
    if len(found) < 2:
        return ""
    worst = sorted(found, key=lambda language: -found[language]["tokens_per_character"])
    described = ", ".join(
        f"{language} {found[language]['tokens_per_character']:.2f} "
        f"({found[language]['covered']:.1%})"
        for language in worst[:_LISTED]
    )
    return f"Most tokens per character, and characters that have pieces: {described}"
