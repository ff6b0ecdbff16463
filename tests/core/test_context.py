"""Tests context scopes and the numbering of repeated reports."""

import pytest
import tensorflow as tf

from lingvo_gshard.core import context


def test_the_default_context_is_not_training():
    assert not context.current().training


def test_scopes_nest_and_exit_on_errors():
    with context.scope(training=True) as outer:
        with pytest.raises(KeyError), context.scope() as inner:
            assert context.current() is inner and not inner.training
            raise KeyError
        assert context.current() is outer and outer.training
    assert context.current() is not outer


def test_repeated_reports_are_numbered():
    with context.scope() as ctx:
        for value in (1.0, 2.0, 3.0):
            ctx.add_loss("a/loss", tf.constant(value))
            ctx.add_metric("a/metric", tf.constant(value))
    assert {k: float(v) for k, v in ctx.losses.items()} == {
        "a/loss": 1.0,
        "a/loss_1": 2.0,
        "a/loss_2": 3.0,
    }
    assert list(ctx.metrics) == ["a/metric", "a/metric_1", "a/metric_2"]


def test_an_override_collects_into_the_enclosing_context():
    with context.scope(training=True) as ctx, context.override(layer_path="a") as inner:
        assert inner.training and context.layer_path() == "a"
        inner.add_loss("a/loss", tf.constant(1.0))
    assert list(ctx.losses) == ["a/loss"] and ctx.layer_path == context.layer_path() == ""


def test_reports_are_float32():
    with context.scope() as ctx:
        ctx.add_loss("a", tf.constant(1.5, tf.bfloat16))
        ctx.add_metric("a", tf.constant(2), weight=tf.constant(3))
    assert ctx.losses["a"].dtype == tf.float32
    assert [part.dtype for part in ctx.metrics["a"]] == [tf.float32, tf.float32]
