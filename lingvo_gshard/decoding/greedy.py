"""Greedy decoding: takes the most likely token at every step."""

from __future__ import annotations

from lingvo_gshard.core.lazy import tf
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
    """Returns the greedy translation of each sentence; stops when all have ended.

    Args:
      task: the model.
      theta: weights of the model.
      source_ids_BK: one sentence per row, 0 in padding; a row of zeros holds no sentence.
      max_length: L, the number of target positions.
      bos_id: id before the first token.
      eos_id: id that ends a sentence.
      limit_B: int32, the largest number of tokens of each translation, EOS included; None:
        max_length.

    Returns:
      int32 [B,L] target ids, `eos_id` at and after the end of each translation.
    """
    batch = source_ids_BK.shape[0]
    memory = encode_sentences(task, theta, source_ids_BK)
    limit_B = tf.fill([batch], max_length) if limit_B is None else limit_B

    def is_running(step, ids_B, active_B, output_BL, cache):
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
    _, _, _, output_BL, _ = tf.while_loop(is_running, extend, state)
    return output_BL
