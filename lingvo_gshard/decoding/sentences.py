"""Encodes source sentences for decoding, one per row."""

from __future__ import annotations

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding.models import TranslationModel
from lingvo_gshard.layers.stacks.transformer_layer import Memory


def encode_sentences(task: TranslationModel, theta: NestedMap, ids_BK: tf.Tensor) -> Memory:
    """Returns the encoder's output for rows of one sentence each, with id 0 in padding."""
    segments_BK = tf.cast(tf.not_equal(ids_BK, 0), tf.int32)
    positions_BK = tf.broadcast_to(tf.range(ids_BK.shape[1])[None], ids_BK.shape)
    return task.encode(theta, ids_BK, segments_BK, positions_BK)


def has_sentence(ids_BK: tf.Tensor) -> tf.Tensor:
    """Returns int32 [B]: 1 for rows that hold a sentence, 0 for rows of padding."""
    return tf.reduce_max(tf.cast(tf.not_equal(ids_BK, 0), tf.int32), axis=1)
