"""PartitioningOptions: how a program is divided over devices, as users ask for it."""

import dataclasses

from lingvo_gshard.core.options import Options, option
from lingvo_gshard.sharding import strategies
from lingvo_gshard.sharding.mesh import DEVICE_ORDERS

PARTITIONERS = ("gspmd", "shardy")
# The strategy where neither options nor the experiment name one.
DEFAULT_STRATEGY = "expert"


@dataclasses.dataclass(frozen=True)
class PartitioningOptions(Options):
    """Options for the division of a step over devices, and the partitioner."""

    mesh: str | None = option(
        None,
        "Mesh axes with their sizes, such as data=4,model=2. Default: sharding.mesh, else data=N "
        "for all N devices. Missing CPU devices are created virtually.",
    )
    strategy: str | None = option(
        None,
        "Which dimensions are split over which axis: one of "
        f"{', '.join(strategies.base_names())}; several joined by '_'; or a table such as "
        f"'B,G->data; H->model'. Default: sharding.strategy, else {DEFAULT_STRATEGY}.",
    )
    device_order: str | None = option(
        None,
        "Order of the devices in the mesh: contiguous, or topology for rings of a TPU's "
        "interconnect. Default: sharding.device_order, contiguous unless set.",
        choices=DEVICE_ORDERS,
    )
    partitioner: str | None = option(
        None,
        "XLA's partitioner: gspmd or shardy. Default: sharding.partitioner, gspmd unless set.",
        choices=PARTITIONERS,
    )
