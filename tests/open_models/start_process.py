"""One of two processes that start with a published model; for test_starting.py.

    python -m tests.open_models.start_process MODEL PORT PROCESS STRATEGY MESH

Prints, as JSON, the bytes that this process has read, and those that its devices hold.
"""

import json
import sys

import jax
import numpy as np

import lingvo_gshard as gshard
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.open_models.starting import PublishedStart


def main(model: str, port: str, process: str, strategy: str, mesh: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", 2, int(process))
    params = gshard.open_model(model, length=16)
    trainer = params.step.instantiate(params.task, params.run.steps)
    runtime = SpmdRuntime(trainer, Partitioning.make(mesh, strategy), jax.devices())
    start = PublishedStart(model, params, lambda text: None)
    found = start.checkpoint(trainer, runtime.abstract_state()).theta
    # Read by itself, as a process without a mesh does.
    whole = PublishedStart(model, params, lambda text: None).checkpoint(trainer, None).theta
    held = 0
    for path, array in found.items():
        own = {str(shard.index): shard for shard in array.addressable_shards}
        for shard in own.values():
            np.testing.assert_array_equal(shard.data, whole[path][shard.index])
            held += shard.data.nbytes
    print(json.dumps({"read": start.bytes_read, "held": held}))


if __name__ == "__main__":
    main(*sys.argv[1:])
