"""Reference attention: loops over rows, queries, keys and heads, in float64."""

from __future__ import annotations

import math

import numpy as np


def attention(p, theta, x, segments, sees) -> np.ndarray:
    """Returns the output [B,L,M] of self-attention.

    Args:
      p: Params of SelfAttention.
      theta: its weights.
      x: input [B,L,M].
      segments: [B,L].
      sees: (b, q, k) -> whether query q attends to key k in row b, before the window is applied.
    """
    weights = {name: np.asarray(value, np.float64) for name, value in theta.flatten_items()}
    heads, head_dim = weights["w_query"].shape[1:]
    group = heads // weights["w_key"].shape[1]
    y = np.zeros(x.shape)
    for b, row in enumerate(x.astype(np.float64)):
        query, key, value = (
            np.einsum("lm,mnd->lnd", row, weights[f"w_{name}"])
            for name in ("query", "key", "value")
        )
        if p.qk_norm:
            query = _rms_norm(query, weights["query_norm.scale"])
            key = _rms_norm(key, weights["key_norm.scale"])
        for i in range(len(row)):
            position = sum(segments[b, j] == segments[b, i] for j in range(i))
            _rotate(query[i], position, p.rotary_fraction, p.rotary_base)
            _rotate(key[i], position, p.rotary_fraction, p.rotary_base)
        for q in range(len(row)):
            seen = [
                k
                for k in range(len(row))
                if sees(b, q, k) and (not p.window or abs(q - k) <= p.window)
            ]
            for n in range(heads):
                scores = np.array(
                    [_score(p, weights, query[q, n], key[k, n // group], n, k - q) for k in seen]
                )
                if not seen:
                    continue
                shares = np.exp(scores - scores.max())
                mixed = shares / shares.sum() @ value[seen, n // group]
                y[b, q] += mixed @ weights["w_out"][n]
    return y


def _score(p, weights, query, key, head, distance) -> float:
    score = query @ key / math.sqrt(len(query))
    if p.logit_cap:
        score = p.logit_cap * math.tanh(score / p.logit_cap)
    if p.relative_buckets:
        score += weights["relative_bias"][_bucket(p, distance), head]
    return score


def _bucket(p, distance: int) -> int:
    """Returns the bucket by intervals: the i-th of n ranges begins at e (m/e)^(i/n).

    arXiv 1910.10683, section 2.1.
    """
    side = p.relative_buckets if p.is_causal else p.relative_buckets // 2
    begin = 0 if p.is_causal or distance <= 0 else side
    exact, far = side // 2, abs(distance)
    if far < exact:
        return begin + far
    ratio = p.relative_max_distance / exact
    begins = [exact * ratio ** (i / (side - exact)) for i in range(side - exact)]
    return begin + exact - 1 + sum(far >= start - 1e-9 for start in begins)


def _rotate(x_ND, position: int, fraction: float, base: float) -> None:
    """Rotates pairs of x in place: complex numbers times exp(i position base^(-2i/r))."""
    turned = round(fraction * x_ND.shape[1])
    half = turned // 2
    for i in range(half):
        angle = position * base ** (-2 * i / turned)
        pair = (x_ND[:, i] + 1j * x_ND[:, half + i]) * np.exp(1j * angle)
        x_ND[:, i], x_ND[:, half + i] = pair.real, pair.imag


def _rms_norm(x, scale) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale
