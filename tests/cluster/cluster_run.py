"""Runs one process of a cluster for tests/cluster/test_cluster.py.

    python -m tests.cluster.cluster_run LOGDIR STEPS PLAN FLAGS...

The processes train a toy state together: theta.w [48, 4], its rows split over all devices, and its
moment. PLAN lists what happens to a process before a step, separated by commas: `1:7:kill` kills
process 1 before its 7th step, `1:0:SIGTERM` asks it to stop before the first.
"""

import json
import os
import resource
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from lingvo_gshard.core import processes
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.signals import EXIT_CODES, StoppedError, StopRequest
from lingvo_gshard.tools.flags.definitions import define
from lingvo_gshard.tools.flags.options import option_flags, read_options
from lingvo_gshard.training.run.checkpoint.arrays import unflatten
from lingvo_gshard.training.run.checkpoint.storage import DiskStorage
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from lingvo_gshard.training.run.logdir import Logdir
from lingvo_gshard.wings.cluster.cluster import Cluster
from lingvo_gshard.wings.cluster.member import ClusterOptions
from lingvo_gshard.wings.cluster.rendezvous import NotMetError
from lingvo_gshard.wings.cluster.worker_report import report_problem, report_step
from tests import tiny

ROWS, COLUMNS = 48, 4
_CHECK_WRITABLE = DiskStorage.check_writable


def shardings():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return split, replicated


def like() -> NestedMap:
    split, replicated = shardings()
    struct = jax.ShapeDtypeStruct
    return NestedMap(
        theta=NestedMap(
            w=struct((ROWS, COLUMNS), jnp.float32, sharding=split),
            scale=struct((3,), jnp.bfloat16, sharding=replicated),
        ),
        moments=NestedMap(w=NestedMap(row=struct((ROWS,), jnp.float32, sharding=split))),
    )


def first_state() -> NestedMap:
    def make(struct):
        size = int(np.prod(struct.shape))
        values = np.arange(size).reshape(struct.shape).astype(struct.dtype)
        return jax.make_array_from_callback(struct.shape, struct.sharding, lambda i: values[i])

    return NestedMap(theta=like().theta.transform(make), moments=like().moments.transform(make))


def make_step():
    """Makes a donating step: w <- w + mean(row), which needs a collective; row <- row + 1."""

    def step(w, row):
        mean = jnp.mean(row)
        return w + mean, row + 1, mean

    return jax.jit(step, donate_argnums=(0, 1))


def _fill(most: int) -> None:
    """Makes the system refuse this process files of more than some bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


def _check_and_fill(self: DiskStorage, needed: int) -> None:
    _CHECK_WRITABLE(self, needed)
    _fill(100)


def do(what: str) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what in ("full", "room"):
        _fill(2000 if what == "full" else resource.RLIM_INFINITY)
        DiskStorage.check_writable = _CHECK_WRITABLE
    elif what == "fill":
        # The disk has room while a save begins, and none for the arrays.
        DiskStorage.check_writable = _check_and_fill
    elif what == "fail":
        raise ValueError("the data of this process cannot be read")
    else:
        os.kill(os.getpid(), getattr(signal, what))


def train(logdir: Logdir, steps: int, plan: dict[int, str], stop: StopRequest) -> None:
    store = CheckpointStore(logdir.checkpoints, keep=2)
    checkpoint = store.restore(like())
    begin, state = 0, first_state()
    if checkpoint is not None:
        begin, items = checkpoint.step, {}
        for item in ("theta", "moments"):
            items[item] = unflatten(like()[item], getattr(checkpoint, item), item)
        state = NestedMap(items)
    take_step = make_step()
    if 0 in plan:
        do(plan[0])
    stop.finishing = True
    step = begin
    while step < steps and not stop.agreed:
        if step + 1 in plan:
            do(plan[step + 1])
        stop.announce()
        state.theta.w, state.moments.w.row, mean = take_step(state.theta.w, state.moments.w.row)
        step += 1
        report_step(step, 0.0, None)
        if processes.is_main():
            print(f"step {step} mean {float(mean)!r}", flush=True)
        if step % 5 == 0:
            store.save(step, state, {"index": step}, f"name : {step}\n")
        time.sleep(0.05)
    store.finish()
    if step not in store.steps:
        store.save(step, state, {"index": step}, f"name : {step}\n")
    assert store.finish() and store.steps[-1] == step
    store.close()
    print(json.dumps({"process": processes.index(), "from": begin, "to": step}), flush=True)


def main(argv: list[str]) -> int:
    logdir, steps, plan = Logdir(argv[1]), int(argv[2]), argv[3]
    values = flags.FlagValues()
    define(values, **option_flags(ClusterOptions()))
    values(argv[:1] + argv[4:])
    steps_of = [item.split(":") for item in plan.split(",") if item]
    options = read_options(values, ClusterOptions)
    if plan == "early":
        Cluster.join(options)
        raise ValueError("after joining, before the program is with the others")
    try:
        with StopRequest() as stop, Cluster.join(options, {"STEPS": str(steps)}) as cluster:
            cluster.logdir = logdir
            assert (cluster.size, cluster.index) == (processes.count(), processes.index())
            mine = {int(k): what for process, k, what in steps_of if int(process) == cluster.index}
            with logdir.claim(tiny.experiment_params()):
                train(logdir, steps, mine, stop)
    except StoppedError as stopped:
        return EXIT_CODES[str(stopped)]
    except ValueError as error:
        report_problem(str(error), is_consequence=isinstance(error, NotMetError))
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
