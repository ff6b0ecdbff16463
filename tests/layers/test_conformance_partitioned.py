"""Every layer of the conformance registry computes on eight devices what it computes on one.

The run on eight devices repeats the choices that routers made on one device. Otherwise the last bit
of a gate could send a token to another expert and change all later results.
"""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe.routers import expert_choice, selection, top2
from tests.layers import conformance, conformance_cases
from tests.tolerances import assert_close

BY_NAME = {case.name: case for case in conformance_cases.CASES}
SEED = (5, 0)
# Splits all letters that any other strategy splits.
HYBRID = ("expert_fsdp_tensor", "data=2,fsdp=2,model=2")
# Cases that differ from MoE.paper in the router only.
SAME_PARTS_AS_PAPER = (
    "MoE.lingvo",
    "MoE.overflow",
    "MoE.switch",
    "MoE.top_k",
    "MoE.forced_balance",
    "MoE.sinkhorn",
)


class Choices:
    """Records the choices of routers in one pass and replays them in another."""

    def __init__(self):
        self._made: list[np.ndarray] = []

    def record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Records choices until `monkeypatch` is undone."""
        best, wants_second = selection.top_1, top2.Top2Router._wants_second
        best_first = expert_choice.tokens_by_score

        def recorded_best(*arguments, **options):
            found = best(*arguments, **options)
            self._made.append(found[0].numpy())
            return found

        def recorded_wants_second(router, gate_GS):
            found = wants_second(router, gate_GS)
            self._made.append(found.numpy())
            return found

        def recorded_best_first(scores_GES):
            order_GES = best_first(scores_GES)
            self._made.append(order_GES.numpy())
            return order_GES

        monkeypatch.setattr(selection, "top_1", recorded_best)
        monkeypatch.setattr(expert_choice, "tokens_by_score", recorded_best_first)
        monkeypatch.setattr(top2.Top2Router, "_wants_second", recorded_wants_second)

    def replay(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replays the recorded choices until `monkeypatch` is undone."""
        calls = itertools.count()

        def next_choice() -> tf.Tensor:
            iteration, call = context.current().iteration, next(calls)
            if iteration is None:
                return tf.constant(self._made[call])
            # All routers are in one loop. Its body is traced once for all iterations, and again for
            # its gradient.
            made = np.stack(self._made).astype(np.float32)
            by_time = np.split(made, iteration.repetition.times)
            choices = [of_time[call % len(of_time)] for of_time in by_time]
            return tf.gather(tf.constant(np.stack(choices)), iteration.index)

        def repeated_best(scores_GSE, excluded_GSE=None):
            expert_GS = tf.cast(next_choice(), tf.int32)
            return expert_GS, tf.one_hot(expert_GS, scores_GSE.shape[-1])

        def repeated_best_first(scores_GES):
            return tf.cast(next_choice(), tf.int32)

        monkeypatch.setattr(selection, "top_1", repeated_best)
        monkeypatch.setattr(expert_choice, "tokens_by_score", repeated_best_first)
        monkeypatch.setattr(top2.Top2Router, "_wants_second", lambda router, gate_GS: next_choice())


@functools.cache
def reference(name: str, training: bool) -> tuple[NestedMap, Choices]:
    """Returns the results on one device, and the choices of its routers."""
    case = BY_NAME[name]
    choices = Choices()
    with pytest.MonkeyPatch.context() as monkeypatch:
        choices.record(monkeypatch)
        theta = conformance.make_theta(case.build())
        inputs = conformance.make_inputs().transform(tf.constant)
        return conformance.pass_of(case, training)(theta, inputs, tf.constant(SEED)), choices


def check(name: str, training: bool, strategy: str, mesh: str) -> None:
    expected, choices = reference(name, training)
    case = BY_NAME[name]
    theta = conformance.make_theta(case.build())
    run = conformance.partitioned_pass_of(case, training, mesh, strategy)
    with pytest.MonkeyPatch.context() as monkeypatch:
        choices.replay(monkeypatch)
        actual = run(theta, conformance.make_inputs(), np.array(SEED, np.int32))
    tf.nest.assert_same_structure(actual, expected)
    for (path, one), other in zip(actual.flatten_items(), expected.flatten(), strict=True):
        assert one.dtype == other.dtype.as_numpy_dtype, path
        separated_by = "order" if path.startswith("gradients") else "float32"
        assert_close(one, other, separated_by)


def with_slow_routers() -> list:
    """Returns the names of cases, with those slow that differ from MoE.paper in the router only.

    Routers work on groups of tokens, each on one device: what is split is the same.
    """
    return [
        pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow])
        if case.values[0] in SAME_PARTS_AS_PAPER
        else case
        for case in conformance_cases.names(BY_NAME)
    ]


@pytest.mark.parametrize("name", with_slow_routers())
def test_hybrid_strategy_in_training(name):
    check(name, True, *HYBRID)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mesh"), [layout for layout in conformance.STRATEGIES if layout != HYBRID]
)
@pytest.mark.parametrize("name", BY_NAME)
def test_every_strategy_in_training(name, strategy, mesh):
    check(name, True, strategy, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_hybrid_strategy_in_evaluation(name):
    """A strategy splits the same letters in training and in evaluation, so one is enough."""
    check(name, False, *HYBRID)
