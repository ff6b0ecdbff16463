"""Reference attention: loops over rows, queries, keys and heads, in float64."""

from __future__ import annotations

import math

import numpy as np

from lingvo_gshard.layers.norm import RMSNorm
from lingvo_gshard.wings.published_layers.heads_norms import HeadsRMSNorm
from lingvo_gshard.wings.published_layers.published_attention import PublishedAttention
from lingvo_gshard.wings.published_layers.rotary_scaling import ProportionalScaling, YarnScaling


def attention(p, theta, x, segments, sees) -> np.ndarray:
    """Returns the output [B,L,M] of self-attention.

    Args:
      p: Params of SelfAttention or of a subclass.
      theta: its weights.
      x: input [B,L,M].
      segments: [B,L].
      sees: (b, q, k) -> whether query q attends to key k in row b, before the window is applied.
    """
    p, weights = _prepared(p, theta)
    heads, head_dim = weights["w_query"].shape[1:]
    group = heads // weights["w_key"].shape[1]
    y = np.zeros(x.shape)
    for b, row in enumerate(x.astype(np.float64)):
        names = ("query", "key", "value" if p.has_value_weight else "key")
        query, key, value = (np.einsum("lm,mnd->lnd", row, weights[f"w_{name}"]) for name in names)
        if p.use_bias:
            query, key, value = (
                x + weights[f"b_{name}"] for name, x in zip(names, (query, key, value), strict=True)
            )
        if p.normalizes_values:
            value = _rms_norm(value, np.ones(value.shape[-1]), RMSNorm.params())
        if p.qk_norm:
            query = _rms_norm(query, weights["query_norm.scale"], p.query_key_norm)
            key = _rms_norm(key, weights["key_norm.scale"], p.query_key_norm)
        value *= p.value_scale
        for i in range(len(row)):
            position = sum(segments[b, j] == segments[b, i] for j in range(i))
            for x in (query[i], key[i]):
                rotate(
                    x, position, p.rotary_fraction, p.rotary_base, p.rotary_pairs, p.rotary_scaling
                )
            if p.temperature_floor:
                query[i] *= growth(p, position)
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
                total = shares.sum()
                if p.use_sinks:
                    total += np.exp(weights["sinks"][n] - scores.max())
                mixed = shares / total @ value[seen, n // group]
                if p.has_output_gate:
                    gate = row[q] @ weights["w_gate"][:, n]
                    gate = gate + weights["b_gate"][n] if p.use_bias else gate
                    mixed /= 1 + np.exp(-gate)
                y[b, q] += mixed @ weights["w_out"][n]
    return y + weights["b_out"] if p.use_output_bias else y


def _prepared(p, theta):
    """Returns Params with all options of attention, and the weights by name in float64."""
    found = PublishedAttention.params()
    found.set(**{name: value for name, value in p.items() if name in found})
    return found, {name: np.asarray(value, np.float64) for name, value in theta.flatten_items()}


def _score(p, weights, query, key, head, distance) -> float:
    score = query @ key * (p.query_scale or 1 / math.sqrt(len(query)))
    if p.logit_cap:
        score = p.logit_cap * math.tanh(score / p.logit_cap)
    if p.relative_buckets:
        score += weights["relative_bias"][bucket(p, distance), head]
    return score


def bucket(p, distance: int) -> int:
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


def growth(p, position) -> float:
    """Returns the factor of a query, by arXiv 2501.19399."""
    steps = (position + p.temperature_offset) // p.temperature_floor
    return 1 + p.temperature_scale * math.log(1 + steps)


def rotate(x_ND, position, fraction, base, pairs="halves", scaling=None) -> None:
    """Rotates pairs of x in place: complex numbers times exp(i position base^(-2i/r))."""
    turned = round(fraction * x_ND.shape[1])
    half = turned // 2
    for i in range(half):
        first, second = (i, half + i) if pairs == "halves" else (2 * i, 2 * i + 1)
        frequency, magnitude = base ** (-2 * i / turned), 1.0
        if scaling is not None and scaling.cls is YarnScaling:
            frequency *= _yarn(scaling, i, turned, base)
            magnitude = scaling.magnitude or 0.1 * math.log(scaling.factor) + 1
        if scaling is not None and scaling.cls is ProportionalScaling and i >= scaling.share * half:
            continue
        pair = (x_ND[:, first] + 1j * x_ND[:, second]) * np.exp(1j * position * frequency)
        x_ND[:, first], x_ND[:, second] = magnitude * pair.real, magnitude * pair.imag


def _yarn(p, pair: int, rotated: int, base: float) -> float:
    """Returns the factor of a pair's frequency: 1 for fast pairs, 1 / factor for slow ones.

    Pair d turns original_length / (2 pi base^(2d/rotated)) times in a text of training.
    """

    def pair_that_turns(times: float) -> float:
        return rotated / 2 * math.log(p.original_length / (2 * math.pi * times), base)

    first = max(math.floor(pair_that_turns(p.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(p.beta_slow)), rotated - 1)
    slow = min(max((pair - first) / (last - first), 0), 1)
    return (1 - slow) + slow / p.factor


def _rms_norm(x, scale, p) -> np.ndarray:
    axes = (-2, -1) if p.cls is HeadsRMSNorm else -1
    scale = scale + 1 if p.zero_centered else scale
    return x / np.sqrt((x**2).mean(axes, keepdims=True) + p.epsilon) * scale
