"""Texts in a TensorFlow graph: the normal form, and ids, as `data/` makes them in Python."""

from __future__ import annotations

import functools
import operator
import sys
import unicodedata
from typing import Any

from lingvo_gshard.core.lazy import tf, tf_text
from lingvo_gshard.data.cleaning.normalization import Normalizer
from lingvo_gshard.data.vocabulary import Vocabulary


class NormalizerInGraph:
    """Converts texts to the normal form of `data.cleaning.normalization.Normalizer`.

    The classes of characters are those of Python's tables, since those of a regular expression may
    be of another version of Unicode.
    """

    def __init__(self):
        normal, classes = Normalizer(), {"": [], " ": []}
        for code in range(sys.maxunicode + 1):
            category = unicodedata.category(chr(code))
            # A character between two letters stays, goes, or becomes a space.
            if category in ("Cc", "Cf", "Zs", "Zl", "Zp"):
                shown = normal(f"a{chr(code)}b")[1:-1]
                classes.setdefault(shown, []).append(code)
        self._removed, self._space = _pattern(classes[""]), _pattern(classes[" "])

    def __call__(self, texts: tf.Tensor) -> tf.Tensor:
        """Returns the normal form of strings in UTF-8. Bytes that are not UTF-8 become U+FFFD."""
        valid = tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8", errors="replace")
        composed = tf_text.normalize_utf8(valid, "NFC")
        visible = tf.strings.regex_replace(composed, self._removed, "")
        single = tf.strings.regex_replace(visible, f"{self._space}+", " ")
        stripped = tf.strings.regex_replace(single, "^ | $", "")
        # Taking a character out may bring a letter and its accent together.
        found: Any = tf_text.normalize_utf8(stripped, "NFC")
        return found


class VocabularyInGraph:
    """Encodes texts to ids and decodes ids.

    Attributes:
      tokenizer: tensorflow-text's SentencePiece, with the vocabulary's model.
    """

    def __init__(self, vocabulary: Vocabulary):
        int32: Any = tf.int32
        self.tokenizer: Any = tf_text.SentencepieceTokenizer(vocabulary.model, out_type=int32)
        self._special = sorted({vocabulary.pad_id, vocabulary.bos_id})

    def encode(self, texts: tf.Tensor) -> tf.RaggedTensor:
        """Returns the int32 ids of each text, without those of its beginning and end."""
        return self.tokenizer.tokenize(texts)

    def decode(self, ids: tf.RaggedTensor) -> tf.Tensor:
        """Returns the texts of ids. Padding and the id before all texts do not count."""
        is_kept = functools.reduce(operator.and_, [ids != special for special in self._special])
        return self.tokenizer.detokenize(tf.ragged.boolean_mask(ids, is_kept))


def _pattern(codes: list[int]) -> str:
    """Returns a regular expression in RE2's syntax that matches one of some characters."""
    ranges: list[list[int]] = []
    for code in sorted(codes):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "[" + "".join(f"\\x{{{first:X}}}-\\x{{{last:X}}}" for first, last in ranges) + "]"
