"""What may be split, and where: letters name dimensions, and the layout is the annotation.

Beside the letters stand the paper's own calls (`replicate`, `split`, `shard`, `mesh_split`) and
`manual` regions, whose author moves the data.
"""

from lingvo_gshard.sharding.annotate import annotate, annotate_like, annotate_weights
from lingvo_gshard.sharding.einsum import einsum
from lingvo_gshard.sharding.manual import full_to_shard, manual, shard_to_full
from lingvo_gshard.sharding.paper_api import mesh_split, replicate, shard, split

__all__ = [
    "annotate",
    "annotate_like",
    "annotate_weights",
    "einsum",
    "full_to_shard",
    "manual",
    "mesh_split",
    "replicate",
    "shard",
    "shard_to_full",
    "split",
]
