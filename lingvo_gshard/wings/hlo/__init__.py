"""The one reader of compiled programs: operations, loops, FLOPs, memory traffic, collectives."""

from lingvo_gshard.wings.hlo.costs import convolution_flops
from lingvo_gshard.wings.hlo.kernels import KernelCall, Kernels
from lingvo_gshard.wings.hlo.module import Module, Shape, read_module, read_proto
from lingvo_gshard.wings.hlo.names import FullReplication
from lingvo_gshard.wings.hlo.operations import (
    PHASES,
    Collective,
    CollectiveCall,
    Operation,
    collective_calls,
    count_by_kind,
    count_per_step,
)
from lingvo_gshard.wings.hlo.reader import OperationList, read_operations
from lingvo_gshard.wings.hlo.tpu_slices import Slices

__all__ = [
    "PHASES",
    "Collective",
    "CollectiveCall",
    "FullReplication",
    "KernelCall",
    "Kernels",
    "Module",
    "Operation",
    "OperationList",
    "Shape",
    "Slices",
    "collective_calls",
    "convolution_flops",
    "count_by_kind",
    "count_per_step",
    "read_module",
    "read_operations",
    "read_proto",
]
