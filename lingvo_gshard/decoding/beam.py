"""Beam search with length normalization."""

from __future__ import annotations

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding.models import TranslationModel
from lingvo_gshard.decoding.sentences import encode_sentences, has_sentence
from lingvo_gshard.layers.stacks.transformer_layer import Memory

_IMPOSSIBLE = -1e9


def beam_decode(
    task: TranslationModel,
    theta: NestedMap,
    source_ids_BK: tf.Tensor,
    max_length: int,
    bos_id: int,
    eos_id: int,
    limit_B: tf.Tensor,
    beam_size: int,
    length_exponent: float,
) -> tf.Tensor:
    """Returns the best translation of each sentence that beam search finds.

    Hypotheses that have ended stay in the beam and compete with the others. All are ranked by
    log probability / ((5 + length) / 6) ** length_exponent (Wu et al. 2016, arXiv 1609.08144,
    equation 14).

    Args:
      task: the model.
      theta: weights of the model.
      source_ids_BK: one sentence per row, 0 in padding; a row of zeros holds no sentence.
      max_length: L, the number of target positions.
      bos_id: id before the first token.
      eos_id: id that ends a sentence.
      limit_B: int32, the largest number of tokens of each translation, EOS included.
      beam_size: W, the hypotheses kept for each sentence.
      length_exponent: how strongly long hypotheses are favored; 0 disables it.

    Returns:
      int32 [B,L] target ids, `eos_id` at and after the end of each translation.
    """
    batch = source_ids_BK.shape[0]
    search = _Search(batch, beam_size, eos_id, length_exponent)
    memory = encode_sentences(task, theta, source_ids_BK)
    memory = Memory(
        tf.repeat(memory.output_BKM, beam_size, axis=0),
        tf.repeat(memory.segments_BK, beam_size, axis=0),
    )

    def is_running(step, beam, cache):
        del cache
        return (step < max_length) & tf.reduce_any(beam.active_BW > 0)

    def extend(step, beam, cache):
        rows = batch * beam_size
        ids, active = tf.reshape(beam.ids_BW, [rows]), tf.reshape(beam.active_BW, [rows])
        logits, cache = task.decode_step(theta, ids, active, step, cache)
        log_probability = tf.reshape(tf.nn.log_softmax(logits), [batch, beam_size, -1])
        beam, parent_rows = search.extend(beam, log_probability, step, limit_B)
        return step + 1, beam, task.reorder_cache(cache, parent_rows)

    beam = search.begin(bos_id, has_sentence(source_ids_BK), max_length)
    state = (tf.constant(0), beam, task.init_cache(theta, memory, max_length))
    _, beam, _ = tf.while_loop(is_running, extend, state)
    return beam.output_BWL[:, 0]


class _Search:
    """Extends a beam by one token at a time; the best hypothesis is the first."""

    def __init__(self, batch: int, beam_size: int, eos_id: int, length_exponent: float):
        self._batch, self._beam_size = batch, beam_size
        self._eos_id, self._length_exponent = eos_id, length_exponent

    def begin(self, bos_id: int, has_sentence_B: tf.Tensor, max_length: int) -> NestedMap:
        """Returns a beam with one active hypothesis per sentence; the others are impossible."""
        shape = [self._batch, self._beam_size]
        first = tf.one_hot(tf.zeros([self._batch], tf.int32), self._beam_size)
        return NestedMap(
            ids_BW=tf.fill(shape, bos_id),
            score_BW=tf.where(first > 0, 0.0, _IMPOSSIBLE),
            length_BW=tf.zeros(shape, tf.int32),
            active_BW=tf.broadcast_to(has_sentence_B[:, None], shape),
            output_BWL=tf.fill([*shape, max_length], self._eos_id),
        )

    def extend(
        self, beam: NestedMap, log_probability_BWV: tf.Tensor, step: tf.Tensor, limit_B: tf.Tensor
    ) -> tuple[NestedMap, tf.Tensor]:
        """Returns the beam with one more token, and the row [B*W] that each hypothesis extends."""
        ended_score_V = tf.where(
            tf.equal(tf.range(log_probability_BWV.shape[-1]), self._eos_id), 0.0, _IMPOSSIBLE
        )
        is_active_BW = beam.active_BW > 0
        gain_BWV = tf.where(is_active_BW[..., None], log_probability_BWV, ended_score_V)
        gain, token = tf.math.top_k(gain_BWV, self._beam_size)
        score = beam.score_BW[..., None] + gain
        length_BW = beam.length_BW + beam.active_BW
        ranked = score / self._penalty(length_BW)[..., None]
        flat = [self._batch, self._beam_size**2]
        _, choice_BW = tf.math.top_k(tf.reshape(ranked, flat), self._beam_size)
        parent_BW = choice_BW // self._beam_size

        def of_parent(x: tf.Tensor) -> tf.Tensor:
            return tf.gather(x, parent_BW, batch_dims=1)

        ids_BW = tf.gather(tf.reshape(token, flat), choice_BW, batch_dims=1)
        at_step = tf.equal(tf.range(beam.output_BWL.shape[-1]), step)
        ended_BW = tf.equal(ids_BW, self._eos_id) | (step + 1 >= limit_B)[:, None]
        extended = NestedMap(
            ids_BW=ids_BW,
            score_BW=tf.gather(tf.reshape(score, flat), choice_BW, batch_dims=1),
            length_BW=of_parent(length_BW),
            active_BW=tf.where(ended_BW, 0, of_parent(beam.active_BW)),
            output_BWL=tf.where(at_step, ids_BW[..., None], of_parent(beam.output_BWL)),
        )
        parent_rows = tf.range(self._batch)[:, None] * self._beam_size + parent_BW
        return extended, tf.reshape(parent_rows, [-1])

    def _penalty(self, length_BW: tf.Tensor) -> tf.Tensor:
        return ((5.0 + tf.cast(length_BW, tf.float32)) / 6.0) ** self._length_exponent
