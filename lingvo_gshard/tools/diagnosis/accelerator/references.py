"""References of kernels, in NumPy and float64: what a kernel computes in blocks, all at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lingvo_gshard.wings.kernels.cache_call import CacheCall
from lingvo_gshard.wings.kernels.call import AttentionCall

_HIDDEN = -1e30


def attention(call: AttentionCall, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the output of an attention, and the gradients of all that is not an integer.

    Args:
      call: the static arguments, without dropout.
      operands: queries, keys, values, the segments of both, biases and sinks if the call has them,
        and the gradient of the output.
    """
    query, keys, values, *others, d_mixed = (np.asarray(x) for x in operands)
    query, keys, values, d_mixed = (x.astype(np.float64) for x in (query, keys, values, d_mixed))
    segments, learned = others[: 2 * call.has_segments], others[2 * call.has_segments :]
    batch, heads, queries, _ = query.shape
    shared = keys.shape[1]
    grouped = query.reshape(batch, shared, heads // shared, queries, -1)
    d_grouped = d_mixed.reshape(*grouped.shape[:4], -1)
    dots = grouped @ keys[:, :, None].swapaxes(3, 4)
    cap = call.logit_cap
    logits = cap * np.tanh(dots / cap) if cap else dots
    distance = np.arange(keys.shape[2])[None] - np.arange(queries)[:, None]
    if call.buckets is not None:
        buckets = call.buckets.of(distance)
        logits = logits + learned[0][:, buckets].reshape(1, *logits.shape[1:])
    visible = _visible(call, distance, segments)
    logits = np.where(visible, logits, _HIDDEN)
    sinks = np.full([1, *grouped.shape[1:3], 1, 1], _HIDDEN)
    if call.has_sinks:
        sinks = learned[-1].astype(np.float64).reshape(sinks.shape)
    largest = np.maximum(logits.max(-1, keepdims=True), sinks)
    weights, sink_weight = np.exp(logits - largest) * visible, np.exp(sinks - largest)
    total = weights.sum(-1, keepdims=True) + sink_weight
    weights, sink_weight = weights / total, sink_weight / total
    mixed = weights @ values[:, :, None]
    d_values = (weights.swapaxes(3, 4) @ d_grouped).sum(2)
    weighted = (mixed * d_grouped).sum(-1, keepdims=True)
    d_logits = weights * (d_grouped @ values[:, :, None].swapaxes(3, 4) - weighted)
    if cap:
        d_logits *= 1 - np.tanh(dots / cap) ** 2
    d_query = (d_logits @ keys[:, :, None]).reshape(query.shape)
    d_keys = (d_logits.swapaxes(3, 4) @ grouped).sum(2)
    found = [mixed.reshape(d_mixed.shape), d_query, d_keys, d_values]
    if call.buckets is not None:
        d_heads = d_logits.sum(0).reshape(heads, *distance.shape)
        is_of = [buckets == bucket for bucket in range(call.buckets.count)]
        found.append(np.stack([(d_heads * chosen).sum((1, 2)) for chosen in is_of], 1))
    if call.has_sinks:
        found.append(-(sink_weight * weighted).sum((0, 3)).reshape(-1))
    return found


def _visible(call: AttentionCall, distance: np.ndarray, segments: Sequence) -> np.ndarray:
    """Returns bool [B,1,1,L,K]: whether each query sees each key, at a distance [L,K]."""
    visible = np.ones((1, 1, 1, *distance.shape), bool)
    if call.is_causal:
        visible = visible & (distance <= 0)
    if call.window:
        visible = visible & (np.abs(distance) <= call.window)
    if segments:
        own, other = segments
        visible = visible & (own[:, None, None, :, None] == other[:, None, None, None, :])
    return visible


def cache_attention(call: CacheCall, operands: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the output [B,N,D] of the attention of one token of each row to a ring of slots.

    Args:
      call: the static arguments, without caps and sinks.
      operands: queries [B,N,D], keys, values, the newest slot, and the reach of each row.
    """
    del call
    query, keys, values, newest, reach = map(np.asarray, operands)
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
    mixed = np.zeros((*query.shape[:2], values.shape[3]))
    for row, head in np.ndindex(*query.shape[:2]):
        at = (newest - np.arange(int(reach[row]) + 1)) % keys.shape[2]
        own = head * keys.shape[1] // query.shape[1]
        logits = keys[row, own, at] @ query[row, head]
        weights = np.exp(logits - logits.max())
        mixed[row, head] = weights @ values[row, own, at] / weights.sum()
    return mixed


def grouped_products(
    rows: np.ndarray, weights: np.ndarray, sizes: np.ndarray, d_products: np.ndarray
) -> list[np.ndarray]:
    """Returns products of groups of rows, and the gradients of rows and weights.

    Rows after the last group are NaN, which stands for any number.

    Args:
      rows: [R,M], one group after another.
      weights: [E,M,H].
      d_products: [R,H], the gradients of the products.
    """
    rows, weights, d_products = (np.asarray(x, np.float64) for x in (rows, weights, d_products))
    products, d_rows = np.full(d_products.shape, np.nan), np.full(rows.shape, np.nan)
    d_weights = np.zeros(weights.shape)
    ends = np.cumsum(sizes)
    for group, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        products[start:end] = rows[start:end] @ weights[group]
        d_rows[start:end] = d_products[start:end] @ weights[group].T
        d_weights[group] = rows[start:end].T @ d_products[start:end]
    return [products, d_rows, d_weights]


def swiglu(
    gate: np.ndarray, factor: np.ndarray, d_activated: np.ndarray | None = None
) -> list[np.ndarray]:
    """Returns silu(gate) * factor, and the gradients of both if `d_activated` is given."""
    sigmoid = 1 / (1 + np.exp(-gate))
    activated = gate * sigmoid * factor
    if d_activated is None:
        return [activated]
    d_gate = d_activated * factor * sigmoid * (1 + gate * (1 - sigmoid))
    return [activated, d_gate, d_activated * gate * sigmoid]
