"""How the routers of a run are watched."""

from __future__ import annotations

from lingvo_gshard.core.config.params import Configurable, Params


class Routers(Configurable):
    """The options of watched routers, `trainer.routers`.

    Every `every_steps` steps the forward pass runs once more, on the same batch, and counts where
    each layer's router sends the tokens. Models without experts are not watched.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "every_steps",
            50,
            "Steps from one watched step to the next; 0: routers are not watched.",
            minimum=0,
        )
        p.define(
            "window",
            4,
            "An expert without a token in so many watched steps in a row counts as dead.",
            minimum=1,
        )
        p.define(
            "collapse",
            0.6,
            "A router whose busiest experts exceed an even load by this share of what is possible "
            "has collapsed: 0 is an even load, 1 sends all tokens to the same experts.",
            above=0,
            maximum=1,
        )
        return p
