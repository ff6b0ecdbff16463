"""The precision nvfp4, and the choice of the layers that it leaves in bfloat16."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core import Configurable, Params, UserError
from lingvo_gshard.training import PRECISIONS, STEP_PARTS, Ingredients, Precision, StepPart
from lingvo_gshard.wings.low_precision import nvfp4
from lingvo_gshard.wings.low_precision.fp8 import check_unread
from lingvo_gshard.wings.low_precision.rounding import NVFP4

PRECISIONS.register(NVFP4)(
    Precision(NVFP4, "bfloat16", rounding=nvfp4.Nvfp4(), rules=(nvfp4.EachKey(),))
)


class WideShares(Configurable):
    """Chooses the layers whose products stay in bfloat16 with precision "nvfp4"."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        about = "Share of a stack's layers, to the nearest number, with products in bfloat16: the"
        # 2 and 8 of the 62 layers of the paper's model.
        p.define("first_share", 0.03, f"{about} first ones.", minimum=0, maximum=1)
        p.define("last_share", 0.13, f"{about} last ones.", minimum=0, maximum=1)
        return p


@STEP_PARTS.register("nvfp4")
class WideLayersOfTask(StepPart):
    """Tells the rounding of nvfp4 which layers of the task stay in bfloat16."""

    @classmethod
    def define(cls, p: Params) -> None:
        about = "What precision nvfp4 leaves in bfloat16."
        p.define("nvfp4", WideShares.params(), about, changes_results=False)

    @classmethod
    def choose_precision(cls, p: Params, chosen: Precision) -> Precision:
        """Returns a precision, with the shares of layers that the Params of WideShares choose.

        Raises:
          UserError: they choose one, but the precision is not nvfp4; or the shares are more than
            all layers.
        """
        check_unread(p, NVFP4, chosen)
        if chosen.name != NVFP4:
            return chosen
        shares = p.nvfp4.first_share, p.nvfp4.last_share
        if sum(shares) > 1:
            raise UserError(
                f"step.nvfp4.first_share is {shares[0]} and step.nvfp4.last_share {shares[1]}; "
                "1 or less together was expected"
            )
        return dataclasses.replace(chosen, rounding=nvfp4.Nvfp4(nvfp4.WideLayers(*shares)))

    @classmethod
    def of(cls, made: Ingredients) -> None:
        if isinstance(made.precision.rounding, nvfp4.Nvfp4):
            made.precision.rounding.layers.choose(made.task)
