"""Compares schedules with their closed forms."""

import math

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.training.step import schedules

STEPS = (0, 1, 4, 5, 9, 10, 37, 80, 99, 100, 5_000)


def rates(schedule):
    return [float(schedule(tf.constant(step))) for step in STEPS]


def warm(step, warmup=5):
    return min(1.0, (step + 1) / warmup)


def test_constant_schedule():
    schedule = schedules.Constant.params().set(learning_rate=0.3, warmup_steps=5).instantiate()
    np.testing.assert_allclose(rates(schedule), [0.3 * warm(s) for s in STEPS], rtol=1e-6)


def test_inverse_square_root():
    p = schedules.InverseSquareRoot.params().set(learning_rate=2.0, decay_start=10)
    expected = [2.0 / math.sqrt(max(step, 10)) for step in STEPS]
    np.testing.assert_allclose(rates(p.instantiate()), expected, rtol=1e-6)


def test_inverse_square_root_after_warmup():
    """Follows equation 3 of arXiv 1706.03762, whose steps count from 1."""
    p = schedules.InverseSquareRoot.params()
    p.set(learning_rate=512**-0.5, warmup_steps=20, decay_start=20)
    counted = [step + 1 if step < 20 else step for step in STEPS]
    expected = [512**-0.5 * min(t**-0.5, t * 20**-1.5) for t in counted]
    np.testing.assert_allclose(rates(p.instantiate()), expected, rtol=1e-6)


def test_the_papers_schedule_is_the_default():
    schedule = schedules.InverseSquareRoot.params().instantiate()
    found = [float(schedule(tf.constant(step))) for step in (0, 10_000, 40_000)]
    np.testing.assert_allclose(found, [0.01, 0.01, 0.005], rtol=1e-6)


def test_linear_schedule():
    p = schedules.Linear.params()
    p.set(learning_rate=0.5, warmup_steps=5, total_steps=100, final_fraction=0.1)
    left = [min(1.0, max(0.0, (100 - step) / 95)) for step in STEPS]
    expected = [0.5 * warm(s) * (0.1 + 0.9 * x) for s, x in zip(STEPS, left, strict=True)]
    np.testing.assert_allclose(rates(p.instantiate()), expected, rtol=1e-5)


def test_cosine_schedule():
    p = schedules.Cosine.params().set(learning_rate=0.5, warmup_steps=5, total_steps=100)
    done = [min(1.0, max(0.0, (step - 5) / 95)) for step in STEPS]
    expected = [
        0.5 * warm(s) * (1 + math.cos(math.pi * x)) / 2 for s, x in zip(STEPS, done, strict=True)
    ]
    np.testing.assert_allclose(rates(p.instantiate()), expected, rtol=1e-5, atol=1e-7)


def test_cosine_is_exact_near_its_end():
    p = schedules.Cosine.params().set(learning_rate=1.0, warmup_steps=1, total_steps=100_000)
    left = 10 / 99_999
    found = p.instantiate()(tf.constant(99_990))
    np.testing.assert_allclose(found, np.sin(np.pi * left / 2) ** 2, rtol=1e-2)


def test_cosine_ends_at_its_final_fraction():
    p = schedules.Cosine.params().set(learning_rate=0.5, total_steps=100, final_fraction=0.1)
    expected = [0.05 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / 100))) / 2 for step in STEPS]
    np.testing.assert_allclose(rates(p.instantiate()), expected, rtol=1e-5)


@pytest.mark.parametrize("final", [0.0, 0.2])
def test_warmup_stable_decay(final):
    p = schedules.WarmupStableDecay.params()
    p.set(learning_rate=0.5, warmup_steps=5, total_steps=100, decay_share=0.25)
    p.final_fraction = final
    left = [min(1.0, max(0.0, (100 - step) / 25)) for step in STEPS]
    expected = [0.5 * warm(s) * (final + (1 - final) * x) for s, x in zip(STEPS, left, strict=True)]
    np.testing.assert_allclose(rates(p.instantiate()), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "cls", [schedules.Linear, schedules.Cosine, schedules.WarmupStableDecay, schedules.Constant]
)
def test_is_float32_inside_a_graph(cls):
    p = cls.params()
    if "total_steps" in p:
        p.total_steps = 10
    rate = tf.function(p.instantiate(), jit_compile=True)(tf.constant(3))
    assert rate.dtype == tf.float32 and rate.shape == ()
