"""Setups: what a start of the training runs on. It may change between starts of one run."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Setup:
    """Devices and processes.

    Attributes:
      mesh: axes with their sizes; empty for the local runtime, on one device.
      strategy: what is split over the axes.
      processes: number of processes, each with an equal part of the devices.
    """

    mesh: str = ""
    strategy: str = ""
    processes: int = 1

    def flags(self) -> list[str]:
        """Returns the flags of gshard-train."""
        if not self.mesh:
            return ["--runtime=local"]
        return ["--runtime=spmd", f"--mesh={self.mesh}", f"--strategy={self.strategy}"]

    def __str__(self) -> str:
        if not self.mesh:
            return "one device"
        return f"{self.mesh} {self.strategy}, {self.processes} process(es)"


ONE_DEVICE = (Setup(),)
MESHES = (
    Setup(),
    Setup("data=2", "expert"),
    Setup("data=4", "fsdp"),
    Setup("data=2,model=2", "expert_tensor"),
    Setup("data=2", "expert", processes=2),
    Setup("data=4", "zero1", processes=2),
)
