"""Sets up the real TPUStrategy without a TPU: CPU devices stand in for its eight cores.

A step can be traced on them, but not run. Run as a program, it prints the traced operations as
JSON.
"""

import collections
import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from lingvo_gshard.runtime import tpu_strategy  # noqa: E402
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime  # noqa: E402
from lingvo_gshard.sharding.partitioning import Partitioning  # noqa: E402
from tests import tiny  # noqa: E402

CORES = 8
_HOST = "/job:localhost/replica:0/task:0/device"
_Named = collections.namedtuple("_Named", "name")
_Metadata = collections.namedtuple("_Metadata", "devices num_cores num_hosts num_of_cores_per_host")


class Topology(tf.tpu.experimental.Topology):
    """A topology of 2 x 4 chips with one core each, which are CPU devices."""

    def __init__(self):
        places = [[x, y, 0, 0] for y in range(4) for x in range(2)]
        super().__init__(mesh_shape=[2, 4, 1, 1], device_coordinates=np.array([places], np.int32))

    def tpu_device_name_at_coordinates(self, device_coordinates, job=None):
        return f"{_HOST}:CPU:{self.tpu_device_ordinal_at_coordinates(device_coordinates)}"


class Resolver(tf.distribute.cluster_resolver.TPUClusterResolver):
    """A cluster resolver that answers like a TPU VM with eight cores."""

    def get_tpu_system_metadata(self):
        devices = [_Named(f"{_HOST}:TPU:{core}") for core in range(CORES)]
        return _Metadata(devices, CORES, 1, CORES)


def make_devices():
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * CORES
    )


def traced(runtime, batch):
    """Returns the types of operations on the host's side and in the compiled step."""
    tensors = {name: tf.constant(value) for name, value in batch.items()}
    graph = runtime._train._compiled.get_concrete_function(tensors).graph
    (metadata,) = [op for op in graph.get_operations() if op.type == "TPUReplicateMetadata"]
    (step,) = [
        function
        for function in graph.as_graph_def().library.function
        if function.attr["_XlaMustCompile"].b
    ]
    return {
        "replicas": metadata.get_attr("num_replicas"),
        "cores_per_replica": metadata.get_attr("num_cores_per_replica"),
        "spmd": metadata.get_attr("use_spmd_for_xla_partitioning"),
        "host": collections.Counter(op.type for op in graph.get_operations()),
        "step": collections.Counter(node.op for node in step.node_def),
    }


def main():
    make_devices()
    strategy, cores = tpu_strategy.one_replica(Resolver(tpu="local"), Topology())
    params = tiny.experiment_params()
    trainer = params.step.instantiate(params.task.instantiate(), params.run.steps)
    partitioning = Partitioning.make(f"data={cores}", "B->data; H->data | weights: H->data")
    runtime = tpu_strategy.TpuStrategyRuntime(trainer, strategy, partitioning)
    runtime.init_state()
    expected = SingleDeviceRuntime(trainer)
    expected.init_state()
    for mine, theirs in zip(runtime.state().flatten(), expected.state().flatten(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    found = traced(runtime, tiny.make_batch(1, 0))
    print(
        json.dumps(
            {"cores": cores, "devices": runtime.device_summary, "steps": runtime.step} | found
        )
    )


if __name__ == "__main__":
    main()
