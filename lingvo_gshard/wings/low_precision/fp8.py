"""Precisions whose products have factors of 8 bits, and the options of FP8."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core import Configurable, Params, UserError
from lingvo_gshard.tasks import Task
from lingvo_gshard.training import PRECISIONS, STEP_PARTS, Ingredients, Precision
from lingvo_gshard.wings.low_precision import delayed_scales, devices, rounding
from lingvo_gshard.wings.low_precision.measured import Measured
from lingvo_gshard.wings.pipeline.pipeline import Pipeline

FP8 = "fp8"
_GRADIENTS = {"e5m2": rounding.E5M2, "e4m3": rounding.E4M3}
_SETTING = "step.fp8.delayed_scales"

for _name, _rounding in rounding.ROUNDINGS.items():
    PRECISIONS.register(_name)(Precision(_name, "bfloat16", rounding=_rounding))


class Fp8(Configurable):
    """Chooses how products are rounded with precision "fp8"."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "gradients",
            "e5m2",
            "Type of gradients: e5m2, whose range is larger, or e4m3, which has one bit more.",
            choices=tuple(_GRADIENTS),
        )
        p.define(
            "delayed_scales",
            False,
            "Whether scales are made of the largest magnitudes of earlier steps, so that no "
            "product waits for those of its factors.",
        )
        return p


def check_unread(p: Params, own: str, chosen: Precision) -> None:
    """Raises UserError if options of a precision, `step.<own>`, are set and another is chosen."""
    for name, value in p.get(own).items() if own != chosen.name else ():
        if value != p.get(own).default(name):
            raise UserError(
                f"step.{own}.{name} is {value!r}, but step.precision is {chosen.name!r}. "
                f"Set step.precision = {own!r}, or leave step.{own}.{name} out"
            )


@STEP_PARTS.register("fp8")
class Histories(Measured):
    """Keeps the histories of a task's weights, if the scales of fp8 are delayed."""

    name = "histories"
    titles = {name: "histories of magnitudes"}

    @classmethod
    def define(cls, p: Params) -> None:
        p.define("fp8", Fp8.params(), "How precision fp8 rounds products.", changes_results=False)

    @classmethod
    def choose_precision(cls, p: Params, chosen: Precision) -> Precision:
        """Returns a precision, with the rounding that the Params of Fp8 choose.

        Raises:
          UserError: they choose one, but the precision is not fp8; or a type is unknown.
        """
        check_unread(p, FP8, chosen)
        if chosen.name != FP8:
            return chosen
        kind = rounding.DelayedScales if p.fp8.delayed_scales else rounding.TensorScales
        return dataclasses.replace(chosen, rounding=kind(backward=_GRADIENTS[p.fp8.gradients]))

    @classmethod
    def check_device(cls, precision: Precision, platform: str, name: str, capability: str) -> None:
        """Checks that devices compute products in 8 bits, or simulate them."""
        devices.check_name(precision, platform, name, capability)

    @classmethod
    def device_notes(
        cls, precision: Precision, task: Task, platform: str, has_kernels: bool
    ) -> list[str]:
        """Returns sentences on products that are not computed in 8 bits."""
        return devices.notes(precision, task, platform, has_kernels)

    @classmethod
    def of(cls, made: Ingredients) -> Histories | None:
        """Returns the histories of a trainer, if its Params ask for them.

        Raises:
          UserError: local updates or a pipeline would need histories of their own.
        """
        if not made.params.fp8.delayed_scales:
            return None
        every = made.params.local_updates.every
        if every:
            raise UserError(
                f"{_SETTING} is True, but step.local_updates.every is {every}: workers have no "
                "histories of their own. Set one of them to its default"
            )
        for layer in made.task.all_layers():
            if isinstance(layer, Pipeline):
                raise UserError(
                    f"{_SETTING} is True, but {layer.path} is a pipeline, whose micro-batches "
                    f"would add up their magnitudes. Set {_SETTING} = False"
                )
        return cls(made.task, delayed_scales.beside)
