"""Vocabulary: a SentencePiece model (Kudo and Richardson 2018, arXiv 1808.06226)."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import sentencepiece

from lingvo_gshard.core import UserError, atomic, explained, objects
from lingvo_gshard.data.batching.packing import BOS_ID, EOS_ID, PAD_ID, UNK_ID

_SURROGATE = re.compile("[\ud800-\udfff]")


@contextlib.contextmanager
def encoding(texts: Iterable[str]) -> Iterator[None]:
    """Says which text has half of a character, if encoding the texts fails.

    JSON can hold such a text: `"\\ud800"`. No library of tokenizers takes it.

    Raises:
      UserError: a text has a lone surrogate.
    """
    try:
        yield
    except (TypeError, RuntimeError, UnicodeEncodeError):
        for text in texts:
            if found := _SURROGATE.search(text):
                raise UserError(
                    f"character {found.start() + 1} of the text is the lone surrogate "
                    f"U+{ord(found[0]):X}, which is half of a character"
                ) from None
        raise


def piece_places(
    model: sentencepiece.SentencePieceProcessor, text: str, start: int = 0
) -> list[tuple[int, int]]:
    """Returns begin and end of each token of a text, in characters.

    The bytes of a character that is no piece share its place.

    Args:
      start: is added to all places.
    """
    # Imports protobuf, which only this needs.
    from sentencepiece import sentencepiece_pb2

    messages: Any = sentencepiece_pb2
    found = messages.SentencePieceText.FromString(
        model.encode(text, out_type="serialized_proto")
    ).pieces
    # Places are bytes of UTF-8. Each character has one byte that does not continue another.
    encoded = np.frombuffer(text.encode("utf-8"), np.uint8)
    characters = np.cumsum(np.append((encoded & 0xC0) != 0x80, True)) - 1 + start
    places = []
    end = len(encoded)
    for piece in reversed(found):
        end = piece.end if piece.end > piece.begin else end
        places.append((int(characters[piece.begin]), int(characters[end])))
    return places[::-1]


class Vocabulary:
    """A SentencePiece model. Those trained here have the ids pad 0, bos 1, eos 2, unk 3.

    A model of others without BOS or padding uses EOS for both.

    Attributes:
      suffix: ends the names of its files.
      bos_id: id before a text.
      eos_id: id after a text.
      unk_id: id of pieces without an id of their own.
      before: ids that a model sees before each text.
      end_ids: ids that end a text.
      source_start: ids before a text that an encoder reads.
      target_start: ids before a translation. The first one is never predicted, the others always.
      forbidden_ids: ids that are never predicted.
      can_sample: whether `sample_batch` works. It does not with tokenizers of others.
    """

    suffix = ".model"
    pad_id, bos_id, eos_id, unk_id = PAD_ID, BOS_ID, EOS_ID, UNK_ID
    before: tuple[int, ...] = (BOS_ID,)
    end_ids: tuple[int, ...] = (EOS_ID,)
    source_start: tuple[int, ...] = ()
    target_start: tuple[int, ...] = (BOS_ID,)
    forbidden_ids: tuple[int, ...] = ()
    can_sample = True

    def __init__(self, model: bytes):
        """Reads a serialized SentencePiece model; ValueError if it is damaged or has no EOS."""
        with explained("This is no SentencePiece model", RuntimeError):
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        processor = self._processor
        self.eos_id, self.unk_id = processor.eos_id(), processor.unk_id()
        if self.eos_id < 0:
            raise UserError("The SentencePiece model has no id that ends a text (eos_id)")
        # SentencePiece's id of a missing token is -1.
        self.bos_id = processor.bos_id() if processor.bos_id() >= 0 else self.eos_id
        self.pad_id = processor.pad_id() if processor.pad_id() >= 0 else self.eos_id
        self.before = self.target_start = (self.bos_id,)
        self.end_ids = (self.eos_id,)
        self.model = model

    @property
    def size(self) -> int:
        """The number of ids."""
        return self._processor.vocab_size()

    def encode(self, text: str) -> list[int]:
        """Returns the ids of one line, without BOS and EOS."""
        with encoding([text]):
            return self._processor.encode(text)

    def places(self, text: str) -> list[tuple[int, int]]:
        """Returns begin and end of each token of `encode` in a text, in characters."""
        with encoding([text]):
            return piece_places(self._processor, text)

    def encode_batch(self, texts: Sequence[str], num_threads: int = 2) -> list[list[int]]:
        """Returns the ids of many lines, each as `encode` does."""
        with encoding(texts):
            return self._processor.encode(list(texts), num_threads=num_threads)

    def sample_batch(self, texts: Sequence[str], alpha: float, seed: int) -> list[list[int]]:
        """Returns the ids of many lines, each with a segmentation into pieces drawn at random.

        A "unigram" vocabulary draws segmentation s with a probability proportional to P(s)^alpha,
        where P is the vocabulary's language model (subword regularization, Kudo 2018, arXiv
        1804.10959, section 3.3). A "bpe" vocabulary leaves out each merge with probability alpha
        (BPE-dropout, Provilkov et al. 2020, arXiv 1910.13267).

        Args:
          alpha: at least 0. With "unigram", a larger one prefers likely segmentations more.
          seed: the same lines, alpha and seed give the same ids.
        """
        sentencepiece.set_random_generator_seed(seed)
        # Each thread has a generator of its own, so a second one would make the result random.
        return self._processor.encode(
            list(texts), enable_sampling=True, nbest_size=-1, alpha=alpha, num_threads=1
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids up to the first EOS, without padding and BOS."""
        kept = []
        for piece in map(int, ids):
            # A text may begin with the id that ends it, if there is no other.
            if piece in self.end_ids and (kept or piece != self.bos_id):
                break
            if piece not in (self.pad_id, self.bos_id):
                kept.append(piece)
        return self._decode_kept(kept)

    def text_of(self, ids: Sequence[int]) -> str:
        """Returns the text of all ids. Padding and ids that begin or end texts have none."""
        silent = {self.pad_id, self.bos_id, *self.end_ids}
        return self._decode_kept([index for index in map(int, ids) if index not in silent])

    def is_byte(self, index: int) -> bool:
        """Returns whether an id is one byte, whose text depends on all bytes beside it.

        Of adjacent bytes, the package tokenizers decodes none if one is wrong. SentencePiece
        decodes those that make characters.
        """
        del index
        return False

    def _decode_kept(self, ids: Sequence[int]) -> str:
        """Returns the text of ids that are pieces."""
        return self._processor.decode(ids)

    def begin(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the ids that a model is given for a text: `before`, then the text.

        If both are empty, the result is `bos_id`.

        Args:
          ids: the ids of the text. If they already begin with `before`, it is not repeated.
        """
        has_start = tuple(ids[: len(self.before)]) == self.before
        return ((*ids,) if has_start else (*self.before, *ids)) or (self.bos_id,)

    def piece(self, index: int) -> str:
        """Returns the text of one piece, `▁` for a space."""
        return self._processor.id_to_piece(int(index))

    def save(self, directory: str, name: str = "vocabulary") -> str:
        """Writes a file of this name atomically and returns its path; makes the directory."""
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, f"{name}{self.suffix}")
        atomic.write_atomically(path, self.model)
        return path

    @classmethod
    def load(cls, directory: str, name: str = "vocabulary") -> Vocabulary:
        """Reads what `save` wrote; ValueError if it is missing or damaged."""
        path = os.path.join(directory, f"{name}{cls.suffix}")
        try:
            return cls(objects.read_bytes(path))
        except FileNotFoundError:
            raise UserError(f"{path} is missing; copy the whole directory again") from None
        except ValueError as error:
            raise UserError(f"{path}: {error}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.model == other.model

    def __hash__(self) -> int:
        return hash(self.model)
