"""Sharding: letters name the dimensions of tensors, and strategies split letters over mesh axes.

- `annotate` and `einsum` declare the letters of a tensor.
- `replicate`, `split`, `shard` and `mesh_split` are the annotations of the GShard paper.
- `manual` opens a region whose author moves the data between devices.
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
