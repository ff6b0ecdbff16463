"""What may be split, and where: letters name dimensions, and the layout is the annotation."""

from lingvo_gshard.sharding.annotate import annotate
from lingvo_gshard.sharding.einsum import einsum

__all__ = ["annotate", "einsum"]
