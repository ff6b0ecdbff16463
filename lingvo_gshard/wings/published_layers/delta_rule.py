"""The gated delta rule: a state that maps keys to values and forgets (arXiv 2412.06464).

A head has a state S [D,d]. Each token changes it and reads it (section 3.1 of the paper):

  S_t = a_t S_(t-1) + k_t (b_t (v_t - (a_t S_(t-1))^T k_t))^T     o_t = S_t^T q_t

The decay a_t is in (0, 1], and b_t in (0, 1) is the strength of the write. `run_rows` computes
whole rows in chunks (section 3.3): all products within chunks are computed at once, and a loop over
the chunks carries the state. `run_step` computes one token. Everything is computed in float32.

Neither jax nor TensorFlow has such a recurrence. Only matrix products and one loop are used here,
so the compiler splits them over rows and heads as it splits attention.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lingvo_gshard.core import custom_gradient, known_sizes, tf
from lingvo_gshard.layers import MASKED
from lingvo_gshard.sharding import annotate, einsum

LOCAL_LETTERS = {
    "c": "chunks of a row",
    "t": "positions of a chunk",
    "s": "positions of a chunk that are read",
    "u": "positions of a chunk in between",
    "r": "values of each key head",
    "d": "size of a value",
}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The values that tokens write and read, all float32. Each key head N has r values.

    For one token of each row, `run_step` reads them without the dimension L.

    Attributes:
      query_BLND: normalized and scaled queries.
      key_BLND: normalized keys.
      log_decay_BLNr: logarithms of the decays, at most 0.
    """

    query_BLND: tf.Tensor
    key_BLND: tf.Tensor
    value_BLNrd: tf.Tensor
    log_decay_BLNr: tf.Tensor
    strength_BLNr: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Rows in chunks: all that the rule reads. Where decays do not differ, r or D has the size 1.

    Attributes:
      system_cBNrts: A of the system (I + A) x = y, whose solution x are the values that a chunk
        writes, one position after the other. Only what is below the diagonal counts.
      seen_cBNrts: products of queries with keys, decayed between the two positions.
      reads_cBNrtD: what is left at a position of the state before the chunk.
      kept_cBNrtD: the keys of positions, decayed until the end of the chunk.
    """

    query_cBNrtD: tf.Tensor
    key_cBNrtD: tf.Tensor
    value_cBNrtd: tf.Tensor
    strength_cBNrt: tf.Tensor
    system_cBNrts: tf.Tensor
    seen_cBNrts: tf.Tensor
    reads_cBNrtD: tf.Tensor
    kept_cBNrtD: tf.Tensor


def run_rows(inputs: Inputs, is_first_BL: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the outputs [B,L,N,r,d] of rows, and their last states [B,N,r,D,d].

    Args:
      is_first_BL: bool, whether a token begins a segment, with a state of zeros.
      size: positions of a chunk.
    """
    length = known_sizes(is_first_BL.shape)[1]
    size = min(size, length)
    query_cBNtD = chunks(inputs.query_BLND, "BLND", size)
    key_cBNtD = chunks(inputs.key_BLND, "BLND", size)
    value_cBNrtd = chunks(inputs.value_BLNrd, "BLNrd", size)
    strength_cBNrt = chunks(inputs.strength_BLNr, "BLNr", size)
    sums_cBNrt = tf.cumsum(chunks(inputs.log_decay_BLNr, "BLNr", size), -1)
    segment_cBNrt = segments_in_chunks(is_first_BL, size)[:, :, None, None]
    decay_cBNrts = annotate(decays(sums_cBNrt, segment_cBNrt), "cBNrts")
    products_cBNts = einsum("cBNtD,cBNsD->cBNts", key_cBNtD, key_cBNtD)
    seen_cBNts = einsum("cBNtD,cBNsD->cBNts", query_cBNtD, key_cBNtD)
    reads_cBNrt = tf.where(tf.equal(segment_cBNrt, 0), tf.exp(sums_cBNrt), 0.0)
    keys_cBNrtD = key_cBNtD[:, :, :, None]
    parts = Chunks(
        query_cBNtD[:, :, :, None],
        keys_cBNrtD,
        value_cBNrtd,
        strength_cBNrt,
        products_cBNts[:, :, :, None] * decay_cBNrts * strength_cBNrt[..., None],
        seen_cBNts[:, :, :, None] * decay_cBNrts,
        reads_cBNrt[..., None],
        keys_cBNrtD * decay_cBNrts[..., -1, :, None],
    )
    return run_chunks(parts, length)


def run_chunks(parts: Chunks, length: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the outputs [B,L,N,r,d] of rows of a length, and their last states [B,N,r,D,d]."""
    system_cBNrts, reads_cBNrtD = parts.system_cBNrts, parts.reads_cBNrtD
    size = known_sizes(system_cBNrts.shape)[-1]
    # XLA has no gradient of tf.linalg.set_diag.
    inverse_cBNrts = _inverse(system_cBNrts * (1.0 - tf.eye(size, dtype=system_cBNrts.dtype)))
    strength_cBNrt1 = parts.strength_cBNrt[..., None]
    written_cBNrtd = einsum(
        "cBNrts,cBNrsd->cBNrtd", inverse_cBNrts, parts.value_cBNrtd * strength_cBNrt1
    )
    known_cBNrtD = einsum(
        "cBNrts,cBNrsD->cBNrtD", inverse_cBNrts, parts.key_cBNrtD * (strength_cBNrt1 * reads_cBNrtD)
    )
    states_cBNrDd, last_BNrDd = _states(
        reads_cBNrtD[..., -1, :, None],
        known_cBNrtD,
        parts.kept_cBNrtD,
        einsum("cBNrtD,cBNrtd->cBNrDd", parts.kept_cBNrtD, written_cBNrtd),
    )
    written_cBNrtd -= einsum("cBNrtD,cBNrDd->cBNrtd", known_cBNrtD, states_cBNrDd)
    output_cBNrtd = einsum("cBNrts,cBNrsd->cBNrtd", parts.seen_cBNrts, written_cBNrtd)
    output_cBNrtd += einsum(
        "cBNrtD,cBNrDd->cBNrtd", parts.query_cBNrtD * reads_cBNrtD, states_cBNrDd
    )
    return _rows(output_cBNrtd, length), last_BNrDd


def run_step(inputs: Inputs, state_BNrDd: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the outputs [B,N,r,d] of one token of each row, and the new states.

    Args:
      inputs: what the tokens write and read, without L.
      state_BNrDd: the states before them.
    """
    return change(inputs, state_BNrDd * tf.exp(inputs.log_decay_BLNr)[..., None, None])


def change(inputs: Any, state_BNrDd: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the same as `run_step`, for states that have decayed."""
    query_BND, key_BND = inputs.query_BLND, inputs.key_BLND
    known_BNrd = einsum("BND,BNrDd->BNrd", key_BND, state_BNrDd)
    change_BNrd = (inputs.value_BLNrd - known_BNrd) * inputs.strength_BLNr[..., None]
    state_BNrDd += key_BND[:, :, None, :, None] * change_BNrd[:, :, :, None]
    return einsum("BND,BNrDd->BNrd", query_BND, state_BNrDd), annotate(state_BNrDd, "BNrDd")


def chunks(x: tf.Tensor, layout: str, size: int) -> tf.Tensor:
    """Returns x, cut into c chunks of t positions: [c,B,N,r,t,D], without r or D if x has none.

    In the layout, the letters of heads stand before the others.
    """
    x = in_chunks(x, size)
    names = f"Bct{layout[2:]}"
    heads = "".join(letter for letter in layout[2:] if letter in "Nr")
    ordered = f"cB{heads}t{layout[2 + len(heads) :]}"
    return annotate(tf.transpose(x, [names.index(letter) for letter in ordered]), ordered)


def segments_in_chunks(is_first_BL: tf.Tensor, size: int) -> tf.Tensor:
    """Returns the segment of each position, [c,B,t], counted from the start of its chunk."""
    return tf.cumsum(chunks(tf.cast(is_first_BL, tf.int32), "BL", size), -1)


def in_chunks(x: tf.Tensor, size: int) -> tf.Tensor:
    """Returns x [B,L,...] in chunks of `size` positions, [B,c,t,...].

    The last chunk is padded with zeros: a token of zeros changes no state, and its decay is 1.
    """
    batch, length, *rest = known_sizes(x.shape)
    count = -(-length // size)
    x = tf.pad(x, [[0, 0], [0, count * size - length], *[[0, 0] for _ in rest]])
    return tf.reshape(x, [batch, count, size, *rest])


def _rows(x_cBNrtd: tf.Tensor, length: int) -> tf.Tensor:
    """Returns the first `length` positions [B,L,N,r,d] of chunks."""
    count, batch, heads, values, size, dim = known_sizes(x_cBNrtd.shape)
    x_BctNrd = tf.transpose(x_cBNrtd, (1, 0, 4, 2, 3, 5))
    x_BLNrd = tf.reshape(x_BctNrd, [batch, count * size, heads, values, dim])
    return annotate(x_BLNrd[:, :length], "BLNrd")


def decays(sums: tf.Tensor, segment: tf.Tensor) -> tf.Tensor:
    """Returns what remains at position t of a write at s; 0 in other segments and for later s.

    Args:
      sums: sums [..., t] of the logarithms of decays up to each position.
      segment: int32 [..., t], the segment of each position.

    Returns:
      The decays [..., t, s].
    """
    position_t = tf.range(sums.shape[-1])
    is_visible = tf.equal(segment[..., None], segment[..., None, :])
    is_visible &= position_t[:, None] >= position_t
    # Masked before the exponential: it would overflow for later positions.
    return tf.exp(tf.where(is_visible, sums[..., None] - sums[..., None, :], MASKED))


def _inverse(system_cBNrts: tf.Tensor) -> tf.Tensor:
    """Returns the inverse of I + A for A that is zero on its diagonal and above.

    The inverses of the blocks on the diagonal give the inverses of blocks twice as large: with
    blocks X and Y, and A between them, the new part is -Y A X. This has the accuracy of forward
    substitution, and needs few matrix products.
    """

    @custom_gradient
    def compute(system_cBNrts: tf.Tensor) -> tuple:
        size = known_sizes(system_cBNrts.shape)[-1]
        position_t = tf.range(size)
        inverse_cBNrts = tf.eye(size) + tf.zeros_like(system_cBNrts)
        block = 1
        while block < size:
            row_t, pair_t = position_t // block, position_t // (2 * block)
            is_between_ts = tf.equal(pair_t[:, None], pair_t) & (row_t[:, None] > row_t)
            between_cBNrts = tf.where(is_between_ts, system_cBNrts, 0.0)
            if block == 1:
                inverse_cBNrts -= between_cBNrts
            else:
                inverse_cBNrts -= _product(inverse_cBNrts, _product(between_cBNrts, inverse_cBNrts))
            block *= 2

        def gradient(d_cBNrts: tf.Tensor) -> tf.Tensor:
            d_cBNrts = einsum("cBNrut,cBNrus->cBNrts", inverse_cBNrts, d_cBNrts)
            return -einsum("cBNrtu,cBNrsu->cBNrts", d_cBNrts, inverse_cBNrts)

        return inverse_cBNrts, gradient

    return compute(system_cBNrts)


def _product(left_cBNrtu: tf.Tensor, right_cBNrus: tf.Tensor) -> tf.Tensor:
    return einsum("cBNrtu,cBNrus->cBNrts", left_cBNrtu, right_cBNrus)


def _states(
    decay_cBNrD1: tf.Tensor, known_cBNrtD: tf.Tensor, kept_cBNrtD: tf.Tensor, new_cBNrDd: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the states [c,B,N,r,D,d] before each chunk, and the last ones [B,N,r,D,d].

    A chunk makes of a state S: decay S - kept^T known S + new. The gradient is a loop of the same
    form from the last chunk to the first one.

    Args:
      decay_cBNrD1: what remains of the state, [c,B,N,r,D,1]; r or D may have the size 1.
      known_cBNrtD: rows that give what positions take from the state.
      kept_cBNrtD: the keys of positions, as they are at the end of the chunk.
      new_cBNrDd: what the chunk writes for a state of zeros.
    """

    @custom_gradient
    def compute(
        decay_cBNrD1: tf.Tensor, known_cBNrtD: tf.Tensor, kept_cBNrtD: tf.Tensor, new: tf.Tensor
    ) -> tuple:
        zeros = tf.zeros_like(new[0])
        states, last = _loop(decay_cBNrD1, known_cBNrtD, kept_cBNrtD, new, zeros)

        def gradient(d_states: tf.Tensor, d_last: tf.Tensor) -> tuple:
            axes = [axis for axis, n in enumerate(known_sizes(decay_cBNrD1.shape)) if n == 1]
            after, _ = _loop(decay_cBNrD1, kept_cBNrtD, known_cBNrtD, d_states, d_last, True)
            taken = einsum("cBNrtD,cBNrDd->cBNrtd", known_cBNrtD, states)
            d_taken = einsum("cBNrtD,cBNrDd->cBNrtd", kept_cBNrtD, after)
            return (
                tf.reduce_sum(after * states, axes, keepdims=True),
                -einsum("cBNrtd,cBNrDd->cBNrtD", d_taken, states),
                -einsum("cBNrtd,cBNrDd->cBNrtD", taken, after),
                after,
            )

        return (states, last), gradient

    return compute(decay_cBNrD1, known_cBNrtD, kept_cBNrtD, new_cBNrDd)


def _loop(
    decay_cBNrD1: tf.Tensor,
    known_cBNrtD: tf.Tensor,
    kept_cBNrtD: tf.Tensor,
    new_cBNrDd: tf.Tensor,
    state_BNrDd: tf.Tensor,
    is_backward: bool = False,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the states before each chunk and after the last one; see `_states`."""
    count = known_sizes(new_cBNrDd.shape)[0]

    def step(index: tf.Tensor, state_BNrDd: tf.Tensor, states: tf.TensorArray) -> tuple:
        chunk = count - 1 - index if is_backward else index
        decay_BNrD1, known_BNrtD, kept_BNrtD, new_BNrDd = (
            tf.gather(x, chunk) for x in (decay_cBNrD1, known_cBNrtD, kept_cBNrtD, new_cBNrDd)
        )
        states = states.write(chunk, state_BNrDd)
        taken_BNrtd = einsum("BNrtD,BNrDd->BNrtd", known_BNrtD, state_BNrDd)
        new_BNrDd -= einsum("BNrtD,BNrtd->BNrDd", kept_BNrtD, taken_BNrtd)
        state_BNrDd = state_BNrDd * decay_BNrD1 + new_BNrDd
        return index + 1, annotate(state_BNrDd, "BNrDd"), states

    states = tf.TensorArray(tf.float32, count, element_shape=state_BNrDd.shape)
    _, last_BNrDd, states = tf.while_loop(
        lambda index, *_: index < count,
        step,
        (tf.constant(0), annotate(state_BNrDd, "BNrDd"), states),
        maximum_iterations=count,
    )
    return annotate(states.stack(), "cBNrDd"), last_BNrDd
