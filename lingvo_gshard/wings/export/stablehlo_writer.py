"""Writes decoding programs as StableHLO, which jax alone runs.

    model.json              what the model does, and its programs
    weights.safetensors     the weights as the programs take them
    decode-8x64.stablehlo   decodes up to 8 texts of up to 64 ids; a serialized jax.export.Exported
    vocabulary/             SentencePiece models
    params.json             every hyperparameter

A program takes the weights, in the order of model.json, and int32 ids [rows, length], with the
`pad` of model.json in padding. It returns int32 ids of the answers, `pad` after their ends, and
float32 scores [rows]. docs/decoding.md has a program that runs it.
"""

from __future__ import annotations

import functools
import operator
import pathlib
import sys
import unicodedata
from typing import Any

import msgspec

from lingvo_gshard.core import SILENT, Progress, params_text, tf
from lingvo_gshard.core.lazy import tf_text
from lingvo_gshard.data import Vocabulary, save_pair
from lingvo_gshard.runtime import Array, Program, ProgramOutputs, lower
from lingvo_gshard.sharding import Partitioning
from lingvo_gshard.wings.export.decoder import PortableDecoder
from lingvo_gshard.wings.export.safetensors_writer import save
from lingvo_gshard.wings.preparation.cleaning.normalization import Normalizer
from lingvo_gshard.wings.preparation.cleaning.scripts import ranges_of
from lingvo_gshard.wings.preparation.vocabularies.published_vocabulary import PublishedVocabulary


class NormalizerInGraph:
    """Converts texts to the normal form of `data.cleaning.normalization.Normalizer`.

    Python's tables classify the characters. Classes of regular expressions could be from another
    version of Unicode.
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
        """Returns the int32 ids of each text, without the ids of the beginning and the end."""
        return self.tokenizer.tokenize(texts)

    def decode(self, ids: tf.RaggedTensor) -> tf.Tensor:
        """Returns the texts of ids. Padding and the id before all texts do not count."""
        is_kept = functools.reduce(operator.and_, [ids != special for special in self._special])
        return self.tokenizer.detokenize(tf.ragged.boolean_mask(ids, is_kept))


def _pattern(codes: list[int]) -> str:
    """Returns a regular expression in RE2's syntax that matches one of some characters."""
    ranges = (f"\\x{{{first:X}}}-\\x{{{last:X}}}" for first, last in ranges_of(sorted(codes)))
    return f"[{''.join(ranges)}]"


WEIGHTS = "weights.safetensors"


def write(decoder: PortableDecoder, directory: pathlib.Path, progress: Progress = SILENT) -> None:
    """Writes a decoder into an empty directory; OSError if a file cannot be written."""
    model = decoder.model
    weights = dict(decoder.weights.flatten_items())
    save(directory / WEIGHTS, weights, {"experiment": model.params.name, "step": str(model.step)})
    (directory / "params.json").write_text(params_text.to_json(model.params), encoding="utf-8")
    if decoder.source and decoder.target:
        save_pair(str(directory / "vocabulary"), decoder.source, decoder.target)
    programs = []
    progress.begin("Lowering", "programs", len(decoder.buckets))
    for rows, length in decoder.buckets:
        file = f"decode-{rows}x{length}.stablehlo"
        exported = _program(decoder, rows, length).exported()
        (directory / file).write_bytes(bytes(exported.serialize()))
        programs.append({"file": file, "rows": rows, "length": length})
        progress.update(len(programs))
    record = _record(decoder) | {"weights": list(weights), "programs": programs}
    text = msgspec.json.format(msgspec.json.encode(record), indent=1)
    (directory / "model.json").write_bytes(text)


def _program(decoder: PortableDecoder, rows: int, length: int) -> Program:
    """Returns the program for batches of a size."""
    tree = decoder.weights

    def run(*tensors: tf.Tensor) -> ProgramOutputs:
        *weights, ids_BK = tensors
        token_BL, score_B = decoder.function.run(tree.pack(weights), ids_BK)
        return [("ids", token_BL, ((), ())), ("scores", score_B, ((),))]

    arrays = [
        Array(f"weights.{path}", weight.shape, weight.dtype.name, ((),) * weight.ndim)
        for path, weight in tree.flatten_items()
    ]
    arrays.append(Array("ids", (rows, length), "int32", ((), ())))
    one_device = Partitioning.make("data=1", "replicated")
    return lower(f"decode_{rows}x{length}", run, arrays, one_device, partitioner="shardy")


def _record(decoder: PortableDecoder) -> dict[str, object]:
    """Returns what a program needs to know of the model besides its weights and programs."""
    model, options = decoder.model, decoder.function.options
    return {
        "experiment": model.params.name,
        "step": model.step,
        "task": decoder.kind,
        "precision": decoder.precision,
        "beam_size": options.beam_size,
        "length_exponent": options.length_exponent,
        "bos": decoder.function.facts.bos_id,
        "eos": decoder.source.eos_id if decoder.source else decoder.function.facts.end_ids[0],
        "ends": list(decoder.function.facts.end_ids),
        "pad": decoder.function.facts.pad_id,
        "source_start": list(decoder.source.source_start) if decoder.source else [],
        "longest": decoder.lengths[-1],
        "source_vocabulary": _vocabulary_file(decoder, decoder.source, "source"),
        "target_vocabulary": _vocabulary_file(decoder, decoder.target, "target"),
    }


def _vocabulary_file(
    decoder: PortableDecoder, vocabulary: Vocabulary | None, side: str
) -> str | None:
    if vocabulary is None:
        return None
    if isinstance(vocabulary, PublishedVocabulary):
        return "vocabulary"
    name = "joint" if decoder.source is decoder.target else side
    return f"vocabulary/{name}{vocabulary.suffix}"
