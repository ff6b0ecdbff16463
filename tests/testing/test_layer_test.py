# tests: testing/layers.py, testing/optimizers.py, testing/passes.py
"""A LayerTest finds each fault that it looks for: every class below breaks one rule."""

from __future__ import annotations

import dataclasses
import unittest

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard import testing
from lingvo_gshard.core import initializers
from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.layers.moe.routers import TopKRouter
from lingvo_gshard.layers.moe.routers.scores import LinearScores
from lingvo_gshard.sharding import manual
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.wings.inference.layers import infer


class Scaled(Layer):
    """x w + b, right in all respects."""

    @classmethod
    def params(cls):
        p = super().params()
        p.define("model_dim", 0, "Size of M.")
        return p

    def __init__(self, params, path=""):
        super().__init__(params, path)
        sizes = {"M": self.p.model_dim}
        self.create_variable("w", "M", sizes, initializers.normal(1.0))

    @layer_method
    def fprop(self, theta, x_BLM, mask_BL):
        del mask_BL
        return self.observe(x_BLM * theta.w)


class Drawing(Scaled):
    """Draws random numbers in evaluation."""

    @layer_method
    def fprop(self, theta, x_BLM, mask_BL):
        return x_BLM * theta.w + np.random.normal()


class WrongGradient(Scaled):
    """Has a gradient that is twice the right one."""

    @layer_method
    def fprop(self, theta, x_BLM, mask_BL):
        @custom_gradient
        def double(x):
            return tf.identity(x), lambda d: 2.0 * d

        return double(x_BLM) * theta.w


class SeesPadding(Scaled):
    """Subtracts a mean over all positions, padding included."""

    @layer_method
    def fprop(self, theta, x_BLM, mask_BL):
        return (x_BLM - tf.reduce_mean(x_BLM)) * theta.w


class SeesItsNeighbor(Scaled):
    """Adds the token before, also that of another sentence."""

    @layer_method
    def fprop(self, theta, x_BLM, mask_BL):
        return (x_BLM + tf.pad(x_BLM[:, :-1], [[0, 0], [1, 0], [0, 0]])) * theta.w


class SeesOneShard(Scaled):
    """Takes a mean over the devices' own rows for one over all rows."""

    @layer_method
    def fprop(self, theta, x_BLM, mask_BL):
        def own(part_BLM):
            return part_BLM + tf.reduce_sum(part_BLM) * tf.ones_like(part_BLM)

        return manual(own, ["BLM"], "BLM")(x_BLM) * theta.w


class DecodesDifferently(Scaled):
    """Computes something else in inference."""


@infer.register(DecodesDifferently)
def infer_differently(layer, theta, x_BLM, mask_BL):
    return -layer.fprop(theta, x_BLM, mask_BL)


BROKEN = {
    Drawing: "test_only_random_draws_depend_on_the_seed",
    WrongGradient: "test_gradients_match_difference_quotients",
    SeesPadding: "test_padding_has_no_effect",
    SeesItsNeighbor: "test_packing_does_not_change_a_sentence",
    SeesOneShard: "test_partitioned_it_computes_what_one_device_computes",
    DecodesDifferently: "test_in_a_stack_it_decodes_what_the_whole_model_computes",
}


class ScaledTest(testing.LayerTest):
    PARAMS = Scaled.params()


def outcome(base, params, test, **attributes):
    """Returns the result of one test of a class of tests."""
    found = type("Broken", (base,), {"PARAMS": params, **attributes})
    result = unittest.TestResult()
    unittest.TestSuite([found(test)]).run(result)
    return result


@pytest.mark.parametrize("layer", BROKEN, ids=lambda layer: layer.__name__)
def test_a_fault_is_found(layer):
    strategies = (("data", "data=2"),)
    result = outcome(testing.LayerTest, layer.params(), BROKEN[layer], STRATEGIES=strategies)
    assert result.failures and not result.errors, (result.failures, result.errors)


class WrongLetters(Scaled):
    """Names a dimension twice, so that it cannot be built."""

    def __init__(self, params, path=""):
        super().__init__(params, path)
        self.create_variable("square", "MM", {"M": self.p.model_dim}, initializers.normal(1.0))


class WrongSizes(Scaled):
    """Has a product whose sizes do not fit, so that no pass runs."""

    @layer_method
    def fprop(self, theta, x_BLM, mask_BL):
        return tf.matmul(x_BLM, tf.ones([3, 3]))


@pytest.mark.parametrize(
    ("layer", "first", "cause"),
    [
        (
            WrongLetters,
            "test_a_pass_runs",
            "Layout 'MM' repeats the letter 'M'; name one of them 'm' and declare",
        ),
        (WrongSizes, "test_a_pass_runs", "Matrix size-incompatible"),
        (Drawing, "test_only_random_draws_depend_on_the_seed", "DRAWS = False, another seed gives"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_mistake_is_one_failure_that_says_the_cause(layer, first, cause):
    found = type("Broken", (testing.LayerTest,), {"PARAMS": layer.params()})
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(found).run(result)
    ((test, text),) = result.errors + result.failures
    assert test.id().endswith(first) and cause in text
    assert "with training=True" in text
    passed = int(first != "test_a_pass_runs")
    assert len(result.skipped) == result.testsRun - 1 - passed > 8


def test_a_layer_that_reads_padding_has_one_failure_that_says_so():
    found = type("Broken", (testing.LayerTest,), {"PARAMS": SeesPadding.params()})
    found.STRATEGIES, found.RUNS = (("data", "data=2"),), (("function", True),)
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(found).run(result)
    ((test, text),) = result.errors + result.failures
    assert test.id().endswith(BROKEN[SeesPadding])
    assert "the output at real positions changes with values at padding" in text
    skipped = {t.id().rpartition(".")[2] for t, why in result.skipped if why.startswith("test_p")}
    assert skipped == {BROKEN[SeesItsNeighbor], BROKEN[DecodesDifferently]}


def test_the_first_failure_names_the_strategy():
    strategies = (("data", "data=2"), ("fsdp", "data=2"))
    name = BROKEN[SeesOneShard]
    result = outcome(testing.LayerTest, SeesOneShard.params(), name, STRATEGIES=strategies)
    ((_, text),) = result.failures
    assert "with strategy='data' and mesh='data=2'" in text


class ScoresOfGroups(LinearScores):
    """Adds the mean over a group, later tokens included, to every token."""

    @layer_method
    def logits(self, theta, x_GSM):
        return super().logits(theta, x_GSM + 9.0 * tf.reduce_mean(x_GSM, 1, keepdims=True))


class SeesLaterTokens(TopKRouter):
    """Scores experts for a token by later tokens, and does not say so."""

    scores = ScoresOfGroups()


def test_a_router_that_sees_later_tokens_is_found():
    name = "test_a_causal_layer_takes_it_or_says_why_not"
    assert not outcome(testing.RouterTest, TopKRouter.params(), name).failures
    assert outcome(testing.RouterTest, SeesLaterTokens.params(), name).failures


class Unfreezable(Adam):
    """Moves weights in steps that must not change the state."""

    def update_weight(self, step):
        return super().update_weight(dataclasses.replace(step, is_skipped=False))


def test_an_optimizer_that_ignores_commit_is_found():
    name = "test_a_step_that_must_not_change_the_state_changes_nothing"
    assert not outcome(testing.OptimizerTest, Adam.params(), name).failures
    assert outcome(testing.OptimizerTest, Unfreezable.params(), name).failures


def test_a_class_without_params_is_skipped():
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(testing.LayerTest).run(result)
    assert result.skipped and not result.failures and not result.errors
