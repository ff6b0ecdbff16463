"""float16: the loss is scaled, since small gradients would be zero in this type.

The backward pass computes the gradient of the loss times a scale; the gradient is then divided by
the scale in float32. The scale is as large as the type allows: it grows after many finite steps in
a row. If a gradient is not finite, the step is skipped and the scale becomes smaller. Micikevicius
et al. 2018, arXiv 1710.03740, section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping

from lingvo_gshard.core import (
    Configurable,
    NestedMap,
    Params,
    UserError,
    VariableSpec,
    initializers,
    tf,
)
from lingvo_gshard.training import (
    PRECISIONS,
    STEP_PARTS,
    Ingredients,
    Precision,
    Seen,
    StatePart,
    Verdict,
)

PRECISIONS.register("float16")(Precision("float16", "float16", scales_loss=True))


@STEP_PARTS.register("loss scale")
class LossScale(Configurable, StatePart):
    """Decides how the scale changes. Its state is a NestedMap with these scalars:

    scale          float32
    good_steps     int32, finite steps since the scale last changed
    skipped_steps  int32, skipped steps of the run
    """

    name = "loss_scale"
    titles = {name: "loss scale"}

    @classmethod
    def define(cls, p: Params) -> None:
        about = "How the loss is scaled, with float16."
        p.define("loss_scale", cls.params(), about, changes_results=False)

    @classmethod
    def of(cls, made: Ingredients) -> LossScale | None:
        """Returns the scale of a trainer, if its precision needs one."""
        return made.params.loss_scale.instantiate() if made.precision.scales_loss else None

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("initial", 2.0**15, "The scale of the first step.", above=0)
        p.define("growth_interval", 2000, "Finite steps in a row until the scale grows.", minimum=1)
        p.define("growth_factor", 2.0, "The factor by which the scale grows.", minimum=1)
        p.define(
            "backoff_factor", 0.5, "Factor of the scale after a non-finite step.", above=0, below=1
        )
        p.define("minimum", 1.0, "Smallest scale. A step not finite with it ends the run.", above=0)
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        p = self.p
        if p.initial < p.minimum:
            raise UserError(
                f"step.loss_scale.initial is {p.initial}; minimum, {p.minimum}, or more expected"
            )

    def specs(self) -> NestedMap:
        def spec(name: str, dtype: str, start: float) -> VariableSpec:
            return VariableSpec(f"{self.name}/{name}", "", (), dtype, initializers.constant(start))

        return NestedMap(
            good_steps=spec("good_steps", "int32", 0),
            scale=spec("scale", "float32", self.p.initial),
            skipped_steps=spec("skipped_steps", "int32", 0),
        )

    def before(self, own: NestedMap) -> dict[str, tf.Tensor]:
        """Returns the scale of the loss."""
        return {"scale": own.scale}

    def skipped_so_far(self, own: NestedMap) -> tf.Tensor:
        return own.skipped_steps

    def judge(self, own: NestedMap, seen: Seen) -> Verdict:
        """Skips a step that is not finite. Training ends if the scale cannot become smaller."""
        return Verdict(
            is_skipped=tf.logical_not(seen.finite),
            goes_on=own.scale > self.p.minimum,
            state=self.update(own, seen.finite),
        )

    def metrics(self, own: NestedMap, new: NestedMap, verdict: Verdict) -> dict[str, tf.Tensor]:
        """Returns the scale of the step, and the number of skipped steps."""
        del verdict
        return {"loss_scale": own.scale, "skipped_steps": new.skipped_steps}

    def goes_on(self, metrics: Mapping[str, float]) -> bool:
        """Returns whether the scale of the step can become smaller."""
        return metrics["loss_scale"] > self.p.minimum

    def update(self, state: NestedMap, finite: tf.Tensor) -> NestedMap:
        """Returns the state after a step whose loss and gradients were `finite`, a bool scalar."""
        p, good_steps = self.p, state.good_steps + 1
        grows = good_steps >= p.growth_interval
        grown = state.scale * p.growth_factor
        # A scale does not grow beyond the range of float32.
        grown = tf.where(grows & tf.math.is_finite(grown), grown, state.scale)
        reduced = tf.maximum(state.scale * p.backoff_factor, p.minimum)
        return NestedMap(
            good_steps=tf.where(finite & ~grows, good_steps, 0),
            scale=tf.where(finite, grown, reduced),
            skipped_steps=state.skipped_steps + tf.cast(tf.logical_not(finite), tf.int32),
        )
