"""The one reader of compiled programs: operations, loops, FLOPs, memory traffic, collectives."""

from lingvo_gshard.wings.hlo.costs import convolution_flops as convolution_flops
from lingvo_gshard.wings.hlo.kernels import KernelCall as KernelCall
from lingvo_gshard.wings.hlo.kernels import Kernels as Kernels
from lingvo_gshard.wings.hlo.module import Module as Module
from lingvo_gshard.wings.hlo.module import Shape as Shape
from lingvo_gshard.wings.hlo.module import read_module as read_module
from lingvo_gshard.wings.hlo.module import read_proto as read_proto
from lingvo_gshard.wings.hlo.names import FullReplication as FullReplication
from lingvo_gshard.wings.hlo.operations import PHASES as PHASES
from lingvo_gshard.wings.hlo.operations import Collective as Collective
from lingvo_gshard.wings.hlo.operations import CollectiveCall as CollectiveCall
from lingvo_gshard.wings.hlo.operations import Operation as Operation
from lingvo_gshard.wings.hlo.operations import collective_calls as collective_calls
from lingvo_gshard.wings.hlo.operations import count_by_kind as count_by_kind
from lingvo_gshard.wings.hlo.operations import count_per_step as count_per_step
from lingvo_gshard.wings.hlo.reader import OperationList as OperationList
from lingvo_gshard.wings.hlo.reader import read_operations as read_operations
from lingvo_gshard.wings.hlo.tpu_slices import Slices as Slices
