"""Algorithm 1 of GShard (arXiv 2006.16668) as loops over tokens, in NumPy and float64.

Follows the paper: one group at a time, one token at a time, in two passes.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass
class Entry:
    """The result of one choice of one token."""

    expert: int = -1
    position: int = -1
    kept: bool = False
    gate: float = 0.0


@dataclasses.dataclass
class Group:
    """The routing of one group: the entries keyed by token, without padding, and the loss."""

    first: dict[int, Entry]
    second: dict[int, Entry]
    auxiliary_loss: float


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the softmax over the last dimension in float64."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def capacity(tokens: int, experts: int, factor: float, mode: str) -> int:
    """Returns C = S * factor / E, at least 1. In lingvo mode C is a multiple of 4."""
    slots = int(tokens * factor / experts)
    if mode == "lingvo":
        slots = max(slots, 4)
        while slots % 4:
            slots += 1
    return max(slots, 1)


def route(
    gates_SE: np.ndarray,
    real_S: np.ndarray,
    drawn_S: np.ndarray | None,
    slots: int,
    mode: str,
) -> Group:
    """Routes one group.

    Args:
      gates_SE: gates, which sum to 1 over the experts.
      real_S: False for padding.
      drawn_S: uniform random numbers of the second choices; None uses every second choice.
      slots: capacity of an expert.
      mode: 'paper' or 'lingvo'.
    """
    experts = gates_SE.shape[1]
    tokens = [s for s in range(len(gates_SE)) if real_S[s]]
    count = [0] * experts
    first: dict[int, Entry] = {}
    second: dict[int, Entry] = {}
    for s in tokens:
        e1, e2, g1, g2 = _top_2(gates_SE[s])
        epsilon = 1e-9 if mode == "lingvo" else 0
        first[s] = Entry(expert=e1, gate=g1 / (g1 + g2 + epsilon))
        second[s] = Entry(expert=e2, gate=g2 / (g1 + g2 + epsilon))

    for s in tokens:
        entry = first[s]
        entry.position = count[entry.expert]
        entry.kept = count[entry.expert] < slots
        count[entry.expert] += 1
    auxiliary_loss = _auxiliary_loss(gates_SE[tokens], count)

    for s in tokens:
        entry = second[s]
        used = drawn_S is None or 2 * entry.gate > drawn_S[s]
        entry.position = count[entry.expert]
        entry.kept = bool(count[entry.expert] < slots and used)
        if mode == "paper" or used:
            count[entry.expert] += 1
    if mode == "lingvo":
        auxiliary_loss *= experts**2
    return Group(first, second, auxiliary_loss)


def _top_2(gates_E: np.ndarray) -> tuple[int, int, float, float]:
    """Returns the experts and gates of the two largest gates. Ties go to the earlier expert."""
    e1 = e2 = -1
    for e, gate in enumerate(gates_E):
        if e1 < 0 or gate > gates_E[e1]:
            e1 = e
    for e, gate in enumerate(gates_E):
        if e != e1 and (e2 < 0 or gate > gates_E[e2]):
            e2 = e
    return e1, e2, gates_E[e1], gates_E[e2]


def _auxiliary_loss(gates_SE: np.ndarray, count: list[int]) -> float:
    """Returns (1/E) sum over e of (c_e / S) m_e."""
    tokens, experts = gates_SE.shape
    if not tokens:
        return 0.0
    total = 0.0
    for e in range(experts):
        mean_gate = sum(gates_SE[:, e]) / tokens
        total += count[e] / tokens * mean_gate
    return total / experts
