"""Tests context scopes and the numbering of repeated reports."""

import tensorflow as tf

from lingvo_gshard import testing
from lingvo_gshard.core import context


class ContextTest(testing.TestCase):
    def test_the_default_context_is_not_training(self):
        self.assertFalse(context.current().training)

    def test_scopes_nest_and_exit_on_errors(self):
        with context.scope(training=True) as outer:
            with self.assertRaises(KeyError), context.scope() as inner:
                self.assertIs(context.current(), inner)
                self.assertFalse(inner.training)
                raise KeyError
            self.assertIs(context.current(), outer)
            self.assertTrue(outer.training)
        self.assertIsNot(context.current(), outer)

    def test_repeated_reports_are_numbered(self):
        with context.scope() as ctx:
            for value in (1.0, 2.0, 3.0):
                ctx.add_loss("a/loss", tf.constant(value))
                ctx.add_metric("a/metric", tf.constant(value))
        self.assertEqual(
            {k: float(v) for k, v in ctx.losses.items()},
            {
                "a/loss": 1.0,
                "a/loss_1": 2.0,
                "a/loss_2": 3.0,
            },
        )
        self.assertEqual(list(ctx.metrics), ["a/metric", "a/metric_1", "a/metric_2"])

    def test_an_override_collects_into_the_enclosing_context(self):
        with context.scope(training=True) as ctx, context.override(layer_path="a") as inner:
            self.assertTrue(inner.training)
            self.assertEqual(context.layer_path(), "a")
            inner.add_loss("a/loss", tf.constant(1.0))
        self.assertEqual(list(ctx.losses), ["a/loss"])
        self.assertEqual(ctx.layer_path, context.layer_path())
        self.assertEqual(context.layer_path(), "")

    def test_reports_are_float32(self):
        with context.scope() as ctx:
            ctx.add_loss("a", tf.constant(1.5, tf.bfloat16))
            ctx.add_metric("a", tf.constant(2), weight=tf.constant(3))
        self.assertEqual(ctx.losses["a"].dtype, tf.float32)
        self.assertEqual([part.dtype for part in ctx.metrics["a"]], [tf.float32, tf.float32])


if __name__ == "__main__":
    testing.main()
