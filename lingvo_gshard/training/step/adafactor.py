"""Adafactor: Adam with a second moment that is factored into a row and a column."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core import Params, VariableSpec, letters, tf
from lingvo_gshard.training.step.optimizer import Moments, Optimizer, WeightStep


class Adafactor(Optimizer):
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235, algorithm 4) as in GShard, A.2.

        beta = min(beta2, 1 - t^-0.8)
        V = beta V + (1 - beta) (g^2 + epsilon), stored as its means over rows and over columns
        u = g / sqrt(V);  u /= max(1, rms(u) / update_clip);  w -= learning_rate u

    As in GShard, beta1 is 0 and there is no first moment. A weight is factored over its two largest
    dimensions. Stacked dimensions ('E' experts, 'R' repeated layers, 'P' stages) are not factored,
    so the number of experts does not change the factors. rms(u) is the root mean square over the
    weight, and over each repeated layer or stage separately.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define_fraction("beta2", 0.99, "Upper bound of the decay of the second moment.")
        p.define("decay_exponent", 0.8, "The decay at step t is at most 1 - t^-exponent.", above=0)
        p.define("update_clip", 1.0, "Largest root mean square of the update of a weight.", above=0)
        p.define("epsilon", 1e-30, "Added to the squared gradient.", above=0)
        p.define("min_factored_size", 128, "Smaller dimensions are not factored.", minimum=1)
        p.define("relative_update", False, "Whether to multiply updates by rms(weight).")
        p.define("min_weight_rms", 1e-3, "Least rms(weight) in relative_update.", minimum=0)
        return p

    def moment_layouts(self, spec: VariableSpec) -> dict[str, str]:
        letters = self.factored_letters(spec)
        if letters is None:
            return {"second_moment": spec.layout}
        row, column = letters
        return {
            "row_moment": spec.layout.replace(column, ""),
            "column_moment": spec.layout.replace(row, ""),
        }

    def factored_letters(self, spec: VariableSpec) -> tuple[str, str] | None:
        """Returns the (row, column) letters to factor over; None if the weight is not factored."""
        candidates = [
            (size, index)
            for index, (letter, size) in enumerate(zip(spec.layout, spec.shape, strict=True))
            if letter not in letters.WEIGHT_BATCH and size >= self.p.min_factored_size
        ]
        if len(candidates) < 2 or len(set(spec.layout)) < len(spec.layout):
            return None
        largest = sorted(candidates)[-2:]
        row, column = sorted(index for _, index in largest)
        return spec.layout[row], spec.layout[column]

    def update_weight(self, step: WeightStep) -> tuple[tf.Tensor, Moments]:
        p = self.p
        t = tf.cast(step.number, tf.float32) + 1.0
        # The share of the new value is 1 - beta, which float32 rounds less than beta.
        share = tf.maximum(1.0 - p.beta2, tf.pow(t, -p.decay_exponent))
        moments = self._second_moment(step, share)
        change = self.change(dataclasses.replace(step, moments=moments))
        return step.commit(step.weight, step.weight - change), moments

    def change(self, step: WeightStep) -> tf.Tensor:
        p = self.p
        unclipped = step.gradient * self._inverse_root(step)
        layout = step.spec.layout
        per_weight = [i for i, letter in enumerate(layout) if letter not in letters.STACKS]
        scale = step.learning_rate / tf.maximum(1.0, _rms(unclipped, per_weight) / p.update_clip)
        if p.relative_update:
            scale *= tf.maximum(p.min_weight_rms, _rms(step.weight, per_weight))
        return scale * unclipped

    def _second_moment(self, step: WeightStep, share: tf.Tensor) -> Moments:
        square = step.gradient * step.gradient + self.p.epsilon
        letters = self.factored_letters(step.spec)

        def decay(name: str, new: tf.Tensor) -> tf.Tensor:
            old = step.moments[name]
            return step.commit(old, old + share * (new - old))

        if letters is None:
            return {"second_moment": decay("second_moment", square)}
        row, column = (step.spec.layout.index(letter) for letter in letters)
        row_moment = decay("row_moment", tf.reduce_mean(square, column))
        column_moment = decay("column_moment", tf.reduce_mean(square, row))
        return {"row_moment": row_moment, "column_moment": column_moment}

    def _inverse_root(self, step: WeightStep) -> tf.Tensor:
        """Returns 1 / sqrt(V) from the new moments; it broadcasts to the weight."""
        letters, moments = self.factored_letters(step.spec), step.moments
        if letters is None:
            return tf.math.rsqrt(moments["second_moment"])
        row_moment, column_moment = moments["row_moment"], moments["column_moment"]
        row, column = (step.spec.layout.index(letter) for letter in letters)
        # `row` is less than `column`, so it is still the row's index in row_moment.
        mean = tf.reduce_mean(row_moment, row, keepdims=True)
        row_factor = tf.expand_dims(tf.math.rsqrt(row_moment / mean), column)
        column_factor = tf.expand_dims(tf.math.rsqrt(column_moment), row)
        return row_factor * column_factor


def _rms(value: tf.Tensor, dimensions: list[int]) -> tf.Tensor:
    return tf.sqrt(tf.reduce_mean(value * value, dimensions, keepdims=True))
