"""Reference implementation of token-choice routers: loops over tokens in NumPy and float64.

Follows the papers that the routers cite: one group, one choice and one token at a time.
"""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import numpy as np
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe.routers.router import Router
from lingvo_gshard.layers.moe.routing import TokenChoiceRouting
from lingvo_gshard.testing.layers import assert_close
from tests.layers.moe.algorithm import Entry, softmax

# [S][K] of (expert, gate): all choices of each token in order.
Choices = list[list[tuple[int, float]]]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Logits [G,S,E] and the mask [G,S] of real tokens."""

    logits_GSE: np.ndarray
    real_GS: np.ndarray

    def has_near_ties(self) -> bool:
        """Returns whether rounding to float32 may change the order of gates or tokens."""
        gates_GSE = np.sort(softmax(self.logits_GSE), -1)
        between_tokens = np.diff(np.sort(gates_GSE.max(-1), -1), axis=-1)
        smallest = [np.diff(gates_GSE, axis=-1).min(initial=1), between_tokens.min(initial=1)]
        return min(smallest) < 3e-6


@st.composite
def problems(draw, fewest_experts: int = 2) -> Problem:
    """Draws problems with uniform logits or with preferred experts."""
    groups, tokens = draw(st.tuples(st.integers(1, 3), st.integers(1, 10)))
    num_experts = draw(st.integers(fewest_experts, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    favorite = np.arange(num_experts) * draw(st.sampled_from([0.0, 1.3]))
    logits = (rng.normal(size=(groups, tokens, num_experts)) + favorite) * draw(
        st.sampled_from([0.1, 1.0])
    )
    real = rng.random((groups, tokens)) < draw(st.sampled_from([0.0, 0.6, 1.0]))
    return Problem(logits.astype(np.float32), real)


def make(router: type[Router], experts: int, **values) -> tuple[Router, NestedMap]:
    """Returns a router whose logits equal its inputs, and its weights."""
    params = router.params().set(model_dim=experts, num_experts=experts, **values)
    return params.instantiate(path="router"), NestedMap(w_gate=tf.eye(experts))


def route(layer, theta, x, real=None, training=False, seed=1, ids=None) -> TokenChoiceRouting:
    """Returns the routing of tokens x; `real` masks padding and defaults to all tokens."""
    x = tf.convert_to_tensor(x)
    mask = tf.ones(x.shape[:2]) if real is None else tf.cast(real, tf.float32)
    with context.scope(training=training, seed=tf.constant([seed, 0])):
        return layer.fprop(theta, x, mask, ids)


def top(scores: np.ndarray, count: int) -> list[int]:
    """Returns the indices of the largest scores in descending order. Ties go to the earlier one."""
    found: list[int] = []
    for _ in range(count):
        best = -1
        for e, score in enumerate(scores):
            if e not in found and (best < 0 or score > scores[best]):
                best = e
        found.append(best)
    return found


def slots(tokens: int, experts: int, k: float, factor: float, at_least: int = 1) -> int:
    """Returns the capacity C of an expert for a capacity factor."""
    return min(max(int(tokens * k * factor / experts), at_least), tokens)


def place(
    choices: Choices, real_S: np.ndarray, experts: int, capacity: int, by_gate: bool = False
) -> list[dict[int, Entry]]:
    """Assigns capacity slots in one group.

    Returns the entries of real tokens, keyed by token, for every choice.
    """
    order = [s for s in range(len(real_S)) if real_S[s]]
    if by_gate:
        order.sort(key=lambda s: -choices[s][0][1])
    count = [0] * experts
    assignments: list[dict[int, Entry]] = []
    for i in range(len(choices[0])):
        entries = {}
        for s in order:
            expert, gate = choices[s][i]
            kept = count[expert] < capacity
            entries[s] = Entry(expert, count[expert], kept, gate if kept else 0.0)
            count[expert] += 1
        assignments.append(entries)
    return assignments


def load_balancing_loss(choices: Choices, gates_SE: np.ndarray, real_S: np.ndarray) -> float:
    """Returns E times the sum over experts of (share of choices) * (mean gate) of one group."""
    tokens = [s for s in range(len(real_S)) if real_S[s]]
    experts, total = gates_SE.shape[1], 0.0
    if not tokens:
        return 0.0
    for e in range(experts):
        chosen = [chosen_expert == e for s in tokens for chosen_expert, _ in choices[s]]
        total += sum(chosen) / len(chosen) * sum(gates_SE[s, e] for s in tokens) / len(tokens)
    return total * experts


def assert_same(routing: TokenChoiceRouting, group: int, expected: list[dict[int, Entry]]) -> None:
    """Asserts that the routing of one group equals the entries from `place`."""
    assert len(routing.assignments) == len(expected)
    for choice, entries in zip(routing.assignments, expected, strict=True):
        expert_S, position_S = choice.expert_GS[group].numpy(), choice.position_GS[group].numpy()
        gate_S, kept_S = choice.gate_GS[group].numpy(), choice.kept_GS[group].numpy()
        for s in range(len(kept_S)):
            if s not in entries:
                assert (gate_S[s], kept_S[s]) == (0.0, False)
                continue
            entry = entries[s]
            assert (expert_S[s], position_S[s], kept_S[s]) == (
                entry.expert,
                entry.position,
                entry.kept,
            )
            assert_close(gate_S[s], entry.gate, "float32")


def mean_of_groups(losses: list[float], real_GS: np.ndarray) -> float:
    """Returns the mean of the losses of the groups that have a token; 0 if none has."""
    found = [loss for loss, real_S in zip(losses, real_GS, strict=True) if np.any(real_S)]
    return float(np.mean(found)) if found else 0.0
