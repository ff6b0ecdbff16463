"""The letters that name dimensions, in variables, einsums, sharding rules and reports."""

from lingvo_gshard.core.config import names

LETTERS = {
    "B": "batch rows (packed)",
    "L": "positions of queries",
    "K": "positions of keys and values",
    "G": "groups of tokens in a mixture of experts",
    "S": "tokens in a group",
    "E": "experts",
    "C": "capacity slots of an expert",
    "M": "model",
    "H": "feed-forward hidden",
    "N": "attention heads",
    "D": "size of one head",
    "V": "vocabulary",
    "R": "repeated (stacked) layers",
    "P": "pipeline stages",
    "W": "beam width",
}

# Letters of positions have an axis of the mesh only where no other letter of a tensor claims it:
# positions can stand for any other dimension in sharing a tensor, and for none in a product.
POSITIONS = "LK"


def check_layout(layout: str, rank: int | None) -> None:
    """Raises ValueError if a letter is unknown or stands twice, or the rank is not `layout`'s."""
    for letter in layout:
        if letter not in LETTERS:
            hint = names.nearest(letter, LETTERS)
            raise ValueError(f"Layout {layout!r}: {letter!r} names no dimension. {hint}")
        if layout.count(letter) > 1:
            raise ValueError(f"Layout {layout!r}: letter {letter!r} stands more than once")
    if rank is not None and rank != len(layout):
        raise ValueError(f"Layout {layout!r} has {len(layout)} letters for a tensor of rank {rank}")
