"""Sharding: letters name the dimensions of tensors, and strategies split letters over mesh axes.

- `annotate` and `einsum` declare the letters of a tensor.
- `replicate`, `split`, `shard` and `mesh_split` are the annotations of the GShard paper.
- `manual` opens a region whose author moves the data between devices.
"""

from lingvo_gshard.sharding import collectives, recording, xla
from lingvo_gshard.sharding.annotate import annotate, annotate_like, annotate_weights
from lingvo_gshard.sharding.einsum import einsum
from lingvo_gshard.sharding.manual import full_to_shard, manual, mesh_in_use, resolve, shard_to_full
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.options import PartitioningOptions
from lingvo_gshard.sharding.paper_api import mesh_split, replicate, shard, split
from lingvo_gshard.sharding.partitioning import Partitioning, current_partitioning, use_partitioning
from lingvo_gshard.sharding.platforms import HARDWARE, hardware_of, platform_in_use
from lingvo_gshard.sharding.sharding_tables import REPLICATED, weight_rows
from lingvo_gshard.sharding.strategies import Split, Strategy

__all__ = [
    "HARDWARE",
    "Mesh",
    "Partitioning",
    "PartitioningOptions",
    "REPLICATED",
    "Split",
    "Strategy",
    "annotate",
    "annotate_like",
    "annotate_weights",
    "collectives",
    "current_partitioning",
    "einsum",
    "full_to_shard",
    "hardware_of",
    "manual",
    "mesh_in_use",
    "mesh_split",
    "platform_in_use",
    "recording",
    "replicate",
    "resolve",
    "shard",
    "shard_to_full",
    "split",
    "use_partitioning",
    "weight_rows",
    "xla",
]
