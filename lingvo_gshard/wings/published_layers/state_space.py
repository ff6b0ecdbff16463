"""The state space duality of Mamba-2: a state that adds what tokens write, and forgets.

A head has a state S [D,d]. Each token changes it and reads it (arXiv 2405.21060, section 6):

  S_t = a_t S_(t-1) + k_t v_t^T     o_t = S_t^T q_t

The paper calls k, q and v B, C and dt x. The decay a_t is in (0, 1]. `run_rows` computes whole rows
in chunks with matrix products alone: the states at the ends of chunks depend on each other as
positions within a chunk do. `run_step` computes one token. Everything is computed in float32.
"""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core import known_sizes, tf
from lingvo_gshard.sharding import annotate, einsum
from lingvo_gshard.wings.published_layers.delta_rule import decays, in_chunks

LOCAL_LETTERS = {
    "c": "chunks of a row",
    "z": "chunks of a row that are read",
    "t": "positions of a chunk",
    "s": "positions of a chunk that are read",
    "g": "groups of heads, which share keys and queries",
    "d": "size of a value",
}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The values that tokens write and read, all float32. Each group has N heads.

    For one token of each row, `run_step` reads them without the dimension L.
    """

    query_BLgD: tf.Tensor
    key_BLgD: tf.Tensor
    value_BLgNd: tf.Tensor
    log_decay_BLgN: tf.Tensor


def run_rows(inputs: Inputs, is_first_BL: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the outputs [B,L,g,N,d] of rows, and their last states [B,N,g,D,d].

    Args:
      is_first_BL: bool, whether a token begins a segment, with a state of zeros.
      size: positions of a chunk.
    """
    length = known_sizes(is_first_BL.shape)[1]
    size = min(size, length)
    query_BctgD = annotate(in_chunks(inputs.query_BLgD, size), "BctgD")
    key_BctgD = annotate(in_chunks(inputs.key_BLgD, size), "BctgD")
    value_BctgNd = annotate(in_chunks(inputs.value_BLgNd, size), "BctgNd")
    log_decay_BctgN = annotate(in_chunks(inputs.log_decay_BLgN, size), "BctgN")
    first_Bct = annotate(in_chunks(tf.cast(is_first_BL, tf.int32), size), "Bct")
    batch, count, _ = known_sizes(first_Bct.shape)
    # The segment that a position is in, counted from the start of its row.
    segment_BL = tf.cumsum(tf.reshape(first_Bct, [batch, count * size]), 1)
    segment_Bct = annotate(tf.reshape(segment_BL, first_Bct.shape), "Bct")

    sums_BNgct = tf.cumsum(tf.transpose(log_decay_BctgN, (0, 4, 3, 1, 2)), -1)
    decay_BNgcts = annotate(decays(sums_BNgct, segment_Bct[:, None, None]), "BNgcts")
    seen_Bgcts = einsum("BctgD,BcsgD->Bgcts", query_BctgD, key_BctgD)
    output_BctgNd = einsum(
        "BNgcts,BcsgNd->BctgNd", seen_Bgcts[:, None] * decay_BNgcts, value_BctgNd
    )

    # The writes of a chunk, decayed to its end. Later chunks let them decay further.
    kept_BNgcs = decay_BNgcts[..., -1, :]
    left_BcsgNd = value_BctgNd * tf.transpose(kept_BNgcs, (0, 3, 4, 2, 1))[..., None]
    written_BNgcDd = einsum("BcsgD,BcsgNd->BNgcDd", key_BctgD, left_BcsgNd)
    totals_BNgc = tf.cumsum(sums_BNgct[..., -1], -1)
    ends_Bc = segment_Bct[..., -1]
    decay_BNgcz = annotate(decays(totals_BNgc, ends_Bc[:, None, None]), "BNgcz")
    states_BNgcDd = einsum("BNgcz,BNgzDd->BNgcDd", decay_BNgcz, written_BNgcDd)

    zero = [[0, 0]] * 3
    before_BNgcDd = tf.pad(states_BNgcDd[:, :, :, :-1], [*zero, [1, 0], [0, 0], [0, 0]])
    before_Bc1 = tf.pad(ends_Bc[:, :-1], [[0, 0], [1, 0]])[..., None]
    is_read_Bct = tf.equal(segment_Bct, before_Bc1)[:, None, None]
    reads_BNgct = tf.where(is_read_Bct, tf.exp(sums_BNgct), 0.0)
    read_BctgNd = einsum("BctgD,BNgcDd->BctgNd", query_BctgD, before_BNgcDd)
    output_BctgNd += read_BctgNd * tf.transpose(reads_BNgct, (0, 3, 4, 2, 1))[..., None]
    inner = known_sizes(output_BctgNd.shape)[3:]
    output_BLgNd = tf.reshape(output_BctgNd, [batch, count * size, *inner])[:, :length]
    return annotate(output_BLgNd, "BLgNd"), annotate(states_BNgcDd[:, :, :, -1], "BNgDd")


def run_step(inputs: Inputs, state_BNgDd: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the outputs [B,g,N,d] of one token of each row, and the new states.

    Args:
      inputs: what the tokens write and read, without L.
      state_BNgDd: the states before them.
    """
    decay_BNg = tf.exp(tf.transpose(inputs.log_decay_BLgN, (0, 2, 1)))
    new_BNgDd = einsum("BgD,BgNd->BNgDd", inputs.key_BLgD, inputs.value_BLgNd)
    state_BNgDd = annotate(state_BNgDd * decay_BNg[..., None, None] + new_BNgDd, "BNgDd")
    return einsum("BgD,BNgDd->BgNd", inputs.query_BLgD, state_BNgDd), state_BNgDd
