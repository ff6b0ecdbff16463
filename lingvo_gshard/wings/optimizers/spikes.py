"""Finds spikes of the loss and of the gradient's norm inside the compiled step.

A step is a spike if its loss or its gradient norm is many deviations above the running mean over
the accepted steps. The statistics are part of the training state. A resumed run therefore judges
each step as an uninterrupted one does, and all devices of a mesh agree.

The running mean and variance of values x_1, x_2, ... use the share a_n = 1 / min(n, window):

    d = x_n - mean,   mean += a_n d,   variance = (1 - a_n) (variance + a_n d^2)

Over the first `window` values they are the plain mean and variance (Welford 1962); later they are
exponential moving ones. Spikes do not enter them.

A bad batch makes a single spike, and it is enough to discard its update. Spikes that follow one
another, whatever the batches, come from weights that are bad already: PaLM (arXiv 2204.02311,
section 5.1) went back to a checkpoint about 100 steps before the spike and skipped 200 to 500
batches, and OPT (arXiv 2205.01068, section 2.5) restarted from earlier checkpoints.
"""

from __future__ import annotations

from lingvo_gshard.core import Configurable, NestedMap, Params, VariableSpec, initializers, tf
from lingvo_gshard.training import STEP_PARTS, Ingredients, Seen, StatePart, Verdict

ROLL_BACK = "roll_back"
POLICIES = ("off", "warn", "skip", ROLL_BACK)

# A deviation counts as at least this share of the mean, since a constant value has none.
_LEAST_DEVIATION = 0.01
_WATCHED = ("loss", "gradient_norm")
_COUNTS = ("accepted", "in_a_row", "found", "skipped")


@STEP_PARTS.register("spikes")
class Spikes(Configurable, StatePart):
    """Judges steps. Its state is a NestedMap with these scalars:

    accepted                    int32, steps that the statistics cover
    in_a_row                    int32, spikes since the last accepted step
    found, skipped              int32, spikes and skipped steps of the run
    loss_mean, loss_variance    float32, of the loss over accepted steps
    gradient_norm_mean, gradient_norm_variance
                                float32, the same of the norm before clipping
    """

    name = "spikes"
    titles = {name: "statistics of spikes"}

    @classmethod
    def define(cls, p: Params) -> None:
        about = "How spikes of loss and gradient are handled."
        p.define("spikes", cls.params(), about, changes_results=False)

    @classmethod
    def of(cls, made: Ingredients) -> Spikes | None:
        """Returns what judges the steps; None if the policy is off."""
        found: Spikes = made.params.spikes.instantiate()
        return None if found.p.policy == "off" else found

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "policy",
            "off",
            "What happens in a spike: off (spikes are not looked for), warn, skip, which also "
            "discards the update of the step, or roll_back, which goes back to a checkpoint if "
            "spikes follow one another.",
            choices=POLICIES,
        )
        p.define("deviations", 6.0, "Deviations above the running mean that make a spike.", above=0)
        p.define("window", 100, "Number of steps that the running mean covers.", minimum=2)
        p.define("warmup_steps", 20, "Steps before the first that can be a spike.", minimum=2)
        p.define(
            "most_in_a_row",
            5,
            "After so many spikes in a row the statistics begin anew: the level has changed. With "
            "roll_back the run goes back to a checkpoint instead.",
            minimum=1,
        )
        p.define(
            "roll_back_steps", 100, "Steps that a roll back goes beyond the first spike.", minimum=0
        )
        p.define(
            "skipped_batches",
            300,
            "Number of batches that a roll back skips, from there on; those of the spikes always.",
            minimum=1,
        )
        p.define(
            "most_roll_backs", 10, "An error ends the run after so many roll backs.", minimum=1
        )
        return p

    def specs(self) -> NestedMap:
        def spec(name: str, dtype: str) -> VariableSpec:
            return VariableSpec(f"{self.name}/{name}", "", (), dtype, initializers.constant(0))

        statistics = [f"{name}_{kind}" for name in _WATCHED for kind in ("mean", "variance")]
        return NestedMap(
            {name: spec(name, "int32") for name in _COUNTS}
            | {name: spec(name, "float32") for name in statistics}
        )

    def skipped_so_far(self, own: NestedMap) -> tf.Tensor:
        return own.skipped

    def judge(self, own: NestedMap, seen: Seen) -> Verdict:
        """Returns whether a step is a spike, with the statistics after it.

        A step that is not finite is no spike, and does not change the statistics.
        """
        p, state, finite = self.p, own, seen.finite
        values: dict[str, tf.Tensor] = dict(
            zip(_WATCHED, (tf.cast(seen.loss, tf.float32), seen.norm), strict=True)
        )
        is_ready = finite & (state.accepted >= p.warmup_steps)
        heights = {
            name: tf.where(is_ready, _height(state, name, value), 0.0)
            for name, value in values.items()
        }
        is_outlier = (heights["loss"] > p.deviations) | (heights["gradient_norm"] > p.deviations)
        begins_anew = is_outlier & (state.in_a_row >= p.most_in_a_row)
        is_spike = is_outlier & ~begins_anew
        is_skipped = tf.zeros_like(is_spike) if p.policy == "warn" else is_spike
        new_state = self._accepted(state, values, begins_anew)
        keeps = is_spike | tf.logical_not(finite)
        pairs = zip(state.flatten(), new_state.flatten(), strict=True)
        new_state = state.pack(tf.where(keeps, old, new) for old, new in pairs)
        spike = tf.cast(is_spike, tf.int32)
        new_state.in_a_row = tf.where(finite & ~is_spike, 0, state.in_a_row + spike)
        new_state.found = state.found + spike
        new_state.skipped = state.skipped + tf.cast(is_skipped, tf.int32)
        metrics = {f"{name}_deviations": height for name, height in heights.items()}
        metrics |= {"spike": spike, "spikes": new_state.found}
        if p.policy == ROLL_BACK:
            metrics[ROLL_BACK] = is_spike & (new_state.in_a_row == p.most_in_a_row)
        return Verdict(is_skipped, state=new_state, metrics=metrics)

    def _accepted(
        self, state: NestedMap, values: dict[str, tf.Tensor], begins_anew: tf.Tensor
    ) -> NestedMap:
        """Returns the statistics with the values of an accepted step."""
        count = tf.where(begins_anew, 0, state.accepted) + 1
        share = 1.0 / tf.cast(tf.minimum(count, self.p.window), tf.float32)
        new = NestedMap(state)
        # The window bounds what can matter, and a long run must not overflow the count.
        new.accepted = tf.minimum(count, max(self.p.window, self.p.warmup_steps))
        for name, value in values.items():
            # The first value has the share 1, so what was before does not matter.
            mean, variance = state[f"{name}_mean"], state[f"{name}_variance"]
            delta = value - mean
            new[f"{name}_mean"] = mean + share * delta
            new[f"{name}_variance"] = (1.0 - share) * (variance + share * tf.square(delta))
        return new


def _height(state: NestedMap, name: str, value: tf.Tensor) -> tf.Tensor:
    """Returns how many deviations a value is above its running mean."""
    mean = state[f"{name}_mean"]
    deviation = tf.maximum(tf.sqrt(state[f"{name}_variance"]), _LEAST_DEVIATION * tf.abs(mean))
    # Both are zero if all values were.
    return tf.math.divide_no_nan(value - mean, deviation)
