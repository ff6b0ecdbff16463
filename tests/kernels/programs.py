"""Lowers a step under a partitioning, and runs it on as many CPUs as its mesh has devices."""

import numpy as np

from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.lowering.lowering import lower
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.executable import Executable

# A small topology of each kind of chip that kernels are compiled for.
TPUS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
GPUS = ("gpu:a100:1x4", "gpu:h100:1x4", "gpu:b200:1x4")


def lowered(step, named, partitioning, partitioner="gspmd"):
    """Returns the program of a step whose inputs are stored as the partitioning splits them.

    Args:
      step: takes one tensor for each input.
      named: (name, shape, letters, dtype) of each input.
      partitioning: the mesh, the strategy and the platform.
      partitioner: XLA's partitioner.
    """
    inputs = [
        Array(name, shape, dtype, partitioning.storage_split(shape, partitioning.split(layout)))
        for name, shape, layout, dtype in named
    ]
    return lower("step", step, inputs, partitioning, partitioner=partitioner)


def compiled(program, arrays):
    """Returns the executable of a program, and arrays on its devices."""
    executable = Executable(program, devices_for(program.mesh.size))
    mesh = executable.input_shardings[0].mesh
    return executable, [a.put(x, mesh) for a, x in zip(program.inputs, arrays, strict=True)]


def run(program, arrays):
    """Returns the results of a program, as arrays of NumPy, and its executable."""
    executable, placed = compiled(program, arrays)
    return list(map(np.asarray, executable(*placed))), executable
