"""The table of a family: which published tensor holds which weight, as data."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.open_models.rearrangement import Rearrangement

LAYER, EXPERT = "{layer}", "{expert}"


@dataclasses.dataclass(frozen=True)
class Row:
    """One pattern of published names.

    Attributes:
      published: name of the tensor, such as "model.layers.{layer}.mlp.experts.{expert}.up_proj".
        {layer} counts the layers of a stack; {expert} the experts of a layer.
      weight: path of the weight, such as "decoder.{layer}.feed_forward.experts.w_in". {layer}
        stands for the path of the layer in its stack. A row applies to the layers that have the
        weight.
      arrangement: "<published letters>-><letters of the weight>". With {expert}, the letters are
        those of one expert.
      choose: for a tensor that holds several weights: see `Rearrangement.choose`.
      joined: the letter along which this tensor is the concatenation of the weights of all rows
        with its name, in their order; empty if it holds nothing else.
      beside: path of a weight that the model must have for the row to apply; empty for none.
      not_beside: path of a weight that the model must not have for the row to apply.
    """

    published: str
    weight: str
    arrangement: str
    choose: tuple[tuple[str, int, int], ...] = ()
    joined: str = ""
    beside: str = ""
    not_beside: str = ""

    @property
    def rearrangement(self) -> Rearrangement:
        """The change of dimensions to the weight's, if nothing is joined."""
        return Rearrangement(self.arrangement, self.choose)


Table = tuple[Row, ...]
