"""Greedy decoding: the likeliest token at every step, with key/value caches."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding.models import TranslationModel
from lingvo_gshard.decoding.sentences import encode_sentences, has_sentence


def greedy_decode(
    task: TranslationModel,
    theta: NestedMap,
    source_ids_BK: tf.Tensor,
    max_length: int,
    bos_id: int,
    eos_id: int,
    limit_B: tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns int32 [B, max_length] target ids, eos_id at and after the end of each sentence.

    source_ids hold one sentence a row, 0 where there is none. limit (int32) is the most tokens of
    each sentence, EOS counted; max_length where it is None. The loop ends when every row has.
    """
    batch = source_ids_BK.shape[0]
    memory = encode_sentences(task, theta, source_ids_BK)
    limit_B = tf.fill([batch], max_length) if limit_B is None else limit_B

    def is_under_way(step, ids_B, active_B, output_BL, cache):
        del ids_B, output_BL, cache
        return (step < max_length) & tf.reduce_any(active_B > 0)

    def extend(step, ids_B, active_B, output_BL, cache):
        logits_BV, cache = task.decode_step(theta, ids_B, active_B, step, cache)
        ids_B = tf.argmax(logits_BV, -1, output_type=tf.int32)
        ids_B = tf.where(active_B > 0, ids_B, eos_id)
        at_step = tf.equal(tf.range(max_length), step)[None, :]
        output_BL = tf.where(at_step, ids_B[:, None], output_BL)
        ended_B = tf.equal(ids_B, eos_id) | (step + 1 >= limit_B)
        return step + 1, ids_B, tf.where(ended_B, 0, active_B), output_BL, cache

    state = (
        tf.constant(0),
        tf.fill([batch], bos_id),
        has_sentence(source_ids_BK),
        tf.fill([batch, max_length], eos_id),
        task.init_cache(theta, memory, max_length),
    )
    _, _, _, output_BL, _ = tf.while_loop(is_under_way, extend, state)
    return output_BL
