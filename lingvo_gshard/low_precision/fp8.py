"""Precisions whose products have factors of 8 bits, and the options of FP8."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.layers.stacks.pipeline import Pipeline
from lingvo_gshard.low_precision import delayed_scales, devices
from lingvo_gshard.low_precision.rounding import (
    E4M3,
    E5M2,
    ROUNDINGS,
    DelayedScales,
    TensorScales,
)
from lingvo_gshard.tasks.task import Task
from lingvo_gshard.training.step.measured import Measured
from lingvo_gshard.training.step.precision import PRECISIONS, Precision
from lingvo_gshard.training.step.step_feature import STEP_FEATURES, StepFeature

FP8 = "fp8"
_GRADIENTS = {"e5m2": E5M2, "e4m3": E4M3}
_SETTING = "step.fp8.delayed_scales"

for _name, _rounding in ROUNDINGS.items():
    PRECISIONS.register(_name)(Precision(_name, "bfloat16", rounding=_rounding))


@STEP_FEATURES.register("fp8")
class Fp8(StepFeature):
    """Chooses how products are rounded with precision "fp8"."""

    HELP = "How precision fp8 rounds products."

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "gradients",
            "e5m2",
            "Type of gradients: e5m2, whose range is larger, or e4m3, which has one bit more.",
        )
        p.define(
            "delayed_scales",
            False,
            "Whether scales are made of the largest magnitudes of earlier steps, so that no "
            "product waits for those of its factors.",
        )
        return p

    def precision(self, chosen: Precision) -> Precision:
        """Returns a precision, with the rounding that these Params choose.

        Raises:
          UserError: they choose one, but the precision is not fp8; or a type is unknown.
        """
        p = self.p
        if chosen.name != FP8:
            for name, value in p.items():
                if value != p.default(name):
                    raise UserError(
                        f"step.fp8.{name} is {value!r}, but step.precision is {chosen.name!r}. "
                        f"Set step.precision = {FP8!r}, or leave step.fp8.{name} out"
                    )
            return chosen
        if p.gradients not in _GRADIENTS:
            hint = names.nearest(p.gradients, _GRADIENTS)
            raise UserError(f"step.fp8.gradients is {p.gradients!r}. {hint}")
        kind = DelayedScales if p.delayed_scales else TensorScales
        return dataclasses.replace(chosen, rounding=kind(backward=_GRADIENTS[p.gradients]))

    def part(self, task: Task, step: Params) -> Histories | None:
        """Returns what delayed scales are made of, if the Params choose them."""
        if not self.p.delayed_scales:
            return None
        if step.local_updates.every:
            raise UserError(
                f"{_SETTING} is True, but step.local_updates.every is {step.local_updates.every}: "
                "workers have no histories of their own. Set one of them to its default"
            )
        return Histories(task)

    def check_device(
        self, precision: Precision, platform: str, name: str, capability: str = ""
    ) -> None:
        """Checks that devices compute products in 8 bits, or simulate them."""
        devices.check_name(precision, platform, name, capability)

    def device_notes(
        self, precision: Precision, task: Task, platform: str, has_kernels: bool
    ) -> list[str]:
        """Returns sentences on products that are not computed in 8 bits."""
        return devices.notes(precision, task, platform, has_kernels)


class Histories(Measured):
    """Keeps the histories of a task's weights."""

    name = "histories"

    def __init__(self, task: Task):
        """Declares histories beside the weights of a task.

        Raises:
          UserError: a pipeline of the task would add up what its micro-batches measure.
        """
        for layer in task.all_layers():
            if isinstance(layer, Pipeline):
                raise UserError(
                    f"{_SETTING} is True, but {layer.path} is a pipeline, whose micro-batches "
                    f"would add up their magnitudes. Set {_SETTING} = False"
                )
        super().__init__(task, delayed_scales.beside)
