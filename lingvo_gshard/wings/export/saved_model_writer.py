"""Writes a SavedModel from strings to strings, as TensorFlow Serving loads it.

The signature `serving_default` takes `texts` and returns `outputs` and `scores`. Everything is
inside: the normal form of texts, the tokenizer, the search and its weights. Only the search is
compiled by XLA, once for each size of batch; strings are TensorFlow operations.
"""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lingvo_gshard.core import SILENT, Progress, UserError, known_sizes, params_text, scope_name, tf
from lingvo_gshard.core.lazy import tf_text
from lingvo_gshard.runtime import standard_error
from lingvo_gshard.wings.export.decoder import TRANSLATION, PortableDecoder
from lingvo_gshard.wings.export.stablehlo_writer import NormalizerInGraph, VocabularyInGraph
from lingvo_gshard.wings.preparation.vocabularies.json_vocabulary import JsonVocabulary
from lingvo_gshard.wings.preparation.vocabularies.published_vocabulary import PublishedVocabulary

if TYPE_CHECKING:
    # A function of ids [rows, length] that returns ids [rows, L] and scores [rows].
    Search = Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]

LOCAL_LETTERS = {"r": "rows of one call", "t": "texts of a request"}


def check_installed() -> None:
    """Raises ValueError if tensorflow-text is missing or was built for another TensorFlow."""
    # Imports TensorFlow first, as the command lines prepare it.
    wanted = ".".join(tf.__version__.split(".")[:2])
    advice = f"To install it: pip install 'tensorflow-text~={wanted}.0'"
    if not importlib.util.find_spec("tensorflow_text"):
        raise UserError(
            "`format=saved_model` needs the package tensorflow-text, for the tokenizer in the "
            f"model. {advice}"
        )
    try:
        _ = tf_text.SentencepieceTokenizer
    except tf.errors.NotFoundError:
        found = importlib.metadata.version("tensorflow-text")
        raise UserError(
            f"tensorflow-text {found} does not fit TensorFlow {tf.__version__}. {advice}"
        ) from None


def write(decoder: PortableDecoder, directory: pathlib.Path, progress: Progress = SILENT) -> None:
    """Writes a decoder into an empty directory. Raises UserError if it has no text tokenizer."""
    if not decoder.source or not decoder.target:
        raise UserError(
            f"{decoder.model.params.name} has no text tokenizer, which a SavedModel from strings "
            "to strings needs; `format=stablehlo` writes programs from ids to ids"
        )
    if isinstance(decoder.source, (PublishedVocabulary, JsonVocabulary)):
        raise UserError(
            f"{decoder.model.params.name} has a tokenizer of others, which is not computed in a "
            "graph of TensorFlow; `format=stablehlo` writes programs from ids to ids"
        )
    module: Any = tf.Module()
    module.weights = [
        tf.Variable(weight, trainable=False, name=scope_name(path))
        for path, weight in decoder.weights.flatten_items()
    ]
    module.searches = []
    progress.begin("Tracing", "programs", len(decoder.buckets))
    for rows, length in decoder.buckets:
        module.searches.append(_search(decoder, module.weights, rows, length))
        progress.update(len(module.searches))
    # SentencePiece writes what it loads to standard error.
    with standard_error.hide():
        serve = _Server(decoder, module.searches)
        module.tokenizers = serve.tokenizers
        texts = tf.TensorSpec([None], tf.string, "texts")
        module.serve = tf.function(serve, input_signature=[texts], autograph=False)
        _save(module, directory)
    (directory / "params.json").write_text(params_text.to_json(decoder.model.params), "utf-8")


def _save(module: Any, directory: pathlib.Path) -> None:
    try:
        tf.saved_model.save(module, str(directory), signatures=module.serve)
    except tf.errors.ResourceExhaustedError:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
    except (tf.errors.UnknownError, tf.errors.InternalError, tf.errors.DataLossError) as error:
        # "...; File too large"
        raise OSError(error.message.rpartition("; ")[2]) from None


def _search(
    decoder: PortableDecoder, weights: Sequence[tf.Variable], rows: int, length: int
) -> Search:
    """Returns the compiled search of batches of one size."""

    def search(ids_BK: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values = decoder.weights.pack(weight.read_value() for weight in weights)
        return decoder.function.run(values, ids_BK)

    specs = [tf.TensorSpec([rows, length], tf.int32)]
    made = tf.function(search, input_signature=specs, jit_compile=True, autograph=False)
    made.get_concrete_function()
    return made


def _ragged() -> Any:
    """Returns tf.RaggedTensor, whose makers have no types."""
    return tf.RaggedTensor


class _Server:
    """The function from strings to strings."""

    def __init__(self, decoder: PortableDecoder, searches: Sequence[Search]):
        self._translates = decoder.kind == TRANSLATION
        self._searches, self._sizes = searches, decoder.buckets
        self._rows, self._lengths = decoder.rows, decoder.lengths
        self._facts = decoder.function.facts
        self._most_new = decoder.function.most_new(decoder.lengths[-1])
        self._normal = NormalizerInGraph()
        assert decoder.source is not None and decoder.target is not None
        self._source = VocabularyInGraph(decoder.source)
        self._end = decoder.source.eos_id
        self._target = self._source
        if decoder.target is not decoder.source:
            self._target = VocabularyInGraph(decoder.target)

    @property
    def tokenizers(self) -> list[Any]:
        """The tokenizers, which must be tracked by what is saved."""
        return [self._source.tokenizer, self._target.tokenizer]

    def __call__(self, texts: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns a translation of each text, or the text with its continuation; and scores."""
        if self._translates:
            found = self._source.encode(self._normal(texts))
            new, scores = self._search_all(self._with_end(found))
            return {"outputs": self._normal(self._target.decode(new)), "scores": scores}
        found = self._source.encode(texts)
        new, scores = self._search_all(self._with_beginning(found))
        return {"outputs": self._target.decode(tf.concat([found, new], 1)), "scores": scores}

    def _with_end(self, ids: tf.RaggedTensor) -> tf.RaggedTensor:
        """Cuts sentences to the longest length and appends the end of text, but not if empty."""
        kept = ids[:, : self._lengths[-1] - 1]
        has_ids = tf.cast(kept.row_lengths() > 0, tf.int64)
        ends = tf.fill([tf.reduce_sum(has_ids)], self._end)
        return tf.concat([kept, _ragged().from_row_lengths(ends, has_ids)], 1)

    def _with_beginning(self, ids: tf.RaggedTensor) -> tf.RaggedTensor:
        """Returns texts with the id before all texts; of too long ones only the end."""
        before = tf.fill([ids.nrows(), 1], self._facts.bos_id)
        given = tf.concat([_ragged().from_tensor(before), ids], 1)
        return given[:, -self._lengths[-1] :]

    def _search_all(self, ids: tf.RaggedTensor) -> tuple[tf.RaggedTensor, tf.Tensor]:
        """Returns the new ids and the scores of texts, decoded in batches of similar length."""
        order_t = tf.argsort(ids.row_lengths(), direction="DESCENDING", stable=True)
        sorted_ids, count, most = tf.gather(ids, order_t), ids.nrows(), self._rows[-1]
        calls = tf.maximum(tf.cast(-(-count // most), tf.int32), 1)
        found_ids = tf.TensorArray(
            tf.int32, calls, infer_shape=False, element_shape=[None, self._most_new]
        )
        found_scores = tf.TensorArray(tf.float32, calls, infer_shape=False, element_shape=[None])

        def run_one(call, found_ids, found_scores):
            new, scores = self._search_some(sorted_ids[call * most : (call + 1) * most])
            return call + 1, found_ids.write(call, new), found_scores.write(call, scores)

        _, found_ids, found_scores = tf.while_loop(
            lambda call, *_: call < calls, run_one, (tf.constant(0), found_ids, found_scores)
        )
        place_t = tf.argsort(order_t)
        new = tf.gather(found_ids.concat(), place_t)
        # An id of 0 is after the end of its text, or is padding that the model itself has chosen.
        return _ragged().from_tensor(new), tf.gather(found_scores.concat(), place_t)

    def _search_some(self, ids: tf.RaggedTensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the new ids [r,L] and the scores [r] of texts that fit one call."""
        count = ids.nrows(tf.int32)
        longest = tf.reduce_max(tf.cast(tf.concat([[0], ids.row_lengths()], 0), tf.int32))
        row_bucket = tf.reduce_sum(tf.cast(count > tf.constant(self._rows), tf.int32))
        length_bucket = tf.reduce_sum(tf.cast(longest > tf.constant(self._lengths), tf.int32))

        def branch(search: Search, rows: int, length: int) -> Callable[[], tuple]:
            def run() -> tuple[tf.Tensor, tf.Tensor]:
                ids_rK = ids.to_tensor(shape=[None, length])
                ids_BK = tf.pad(ids_rK, [[0, rows - count], [0, 0]])
                new_BL, score_B = search(tf.ensure_shape(ids_BK, [rows, length]))
                new_rL = new_BL[:count]
                padding = self._most_new - known_sizes(new_BL.shape)[1]
                return tf.pad(new_rL, [[0, 0], [0, padding]]), score_B[:count]

            return run

        pairs = zip(self._searches, self._sizes, strict=True)
        branches = [branch(search, *size) for search, size in pairs]
        return tf.switch_case(row_bucket * len(self._lengths) + length_bucket, branches)
