"""The letters that name tensor dimensions, and what each means for sharding, remat and optimizers.

A layout such as "BLM" names the dimensions of a tensor. Upper-case letters are shared by the whole
package, and a strategy may split them over mesh axes. A file that needs more dimensions uses
lower-case letters. No strategy ever splits those. The file declares them in a module constant:

    LOCAL_LETTERS = {"c": "choices of a token"}

An underscore is a dimension without a name, which no strategy splits either. It may be repeated:
"B___" are images, whose rows alone have a letter. No product contracts it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lingvo_gshard.core.config import names


@dataclasses.dataclass(frozen=True)
class Letter:
    """One kind of dimension.

    Attributes:
      meaning: What an index along the dimension stands for.
      is_row: Indexes the rows or token groups of a batch, which data parallelism splits.
      is_token: Indexes tokens. Activations have such dimensions, most weights have none.
      is_position: Claims mesh axes only after all other letters of a layout. Positions can share
        a tensor with any dimension, and no product contracts them with a weight.
      is_stack: Precedes a weight's own letters where the weights of several layers are stacked.
      is_weight_batch: A weight holds one independent matrix for each index.
      is_inner: Lies between the first and the last weight of a layer. Splitting it leaves partial
        sums at the layer's output.
      is_hidden: Belongs to the largest activations of a layer.
      follows: A letter whose mesh axes also split this letter, unless this letter has its own rule.
    """

    meaning: str
    is_row: bool = False
    is_token: bool = False
    is_position: bool = False
    is_stack: bool = False
    is_weight_batch: bool = False
    is_inner: bool = False
    is_hidden: bool = False
    follows: str = ""


LETTERS = {
    "B": Letter("batch rows (packed)", is_row=True, is_token=True),
    "L": Letter("positions of queries", is_token=True, is_position=True),
    "K": Letter("positions of keys and values", is_token=True, is_position=True),
    "G": Letter("groups of tokens in a mixture of experts", is_row=True, is_token=True),
    "S": Letter("tokens in a group", is_token=True),
    "T": Letter("tokens, flattened over rows or groups", is_token=True),
    "E": Letter("experts", is_weight_batch=True),
    "C": Letter("capacity slots of an expert", is_token=True),
    "M": Letter("model"),
    "H": Letter("feed-forward hidden", is_inner=True, is_hidden=True),
    "U": Letter(
        "parts of H, whose outputs are added later; with M, rows of M for each part",
        is_weight_batch=True,
        follows="H",
    ),
    "N": Letter("attention heads", is_inner=True),
    "D": Letter("size of one head"),
    "V": Letter("vocabulary", is_inner=True),
    "R": Letter("repeated (stacked) layers", is_stack=True, is_weight_batch=True),
    "P": Letter("pipeline stages", is_stack=True, is_weight_batch=True),
    "W": Letter("beam width"),
}


# A dimension without a name.
UNNAMED = "_"


def _select(has_trait: Callable[[Letter], bool]) -> str:
    return "".join(name for name, letter in LETTERS.items() if has_trait(letter))


ROWS = _select(lambda letter: letter.is_row)
TOKENS = _select(lambda letter: letter.is_token)
POSITIONS = _select(lambda letter: letter.is_position)
STACKS = _select(lambda letter: letter.is_stack)
WEIGHT_BATCH = _select(lambda letter: letter.is_weight_batch)
INNER = _select(lambda letter: letter.is_inner)
HIDDEN = _select(lambda letter: letter.is_hidden)


def is_local(letter: str) -> bool:
    """Returns whether a letter is declared by the file that uses it, and never split."""
    return letter.isascii() and letter.islower()


def check_layout(layout: str, rank: int | None, may_be_unnamed: bool = True) -> None:
    """Checks that a layout names every dimension of a tensor once.

    Args:
      rank: The tensor's rank, or None if it is unknown.
      may_be_unnamed: Whether dimensions may be "_".

    Raises:
      ValueError: A letter is unknown or repeated, or the layout has another rank.
    """
    if UNNAMED in layout and not may_be_unnamed:
        raise ValueError(f"Layout {layout!r}: every dimension needs a letter here, not '_'")
    for letter in layout.replace(UNNAMED, ""):
        if letter not in LETTERS and not is_local(letter):
            hint = names.nearest(letter, LETTERS)
            raise ValueError(f"Layout {layout!r}: {letter!r} names no dimension. {hint}")
        if layout.count(letter) > 1:
            own = next(each for each in letter.lower() + "abcdefg" if each not in layout)
            way = f"name one of them {own!r} and declare LOCAL_LETTERS = {{{own!r}: 'its meaning'}}"
            raise ValueError(f"Layout {layout!r} repeats the letter {letter!r}; {way}")
    if rank is not None and rank != len(layout):
        raise ValueError(f"Layout {layout!r} has {len(layout)} letters for a tensor of rank {rank}")
