"""Processes that do not find each other, or do not agree."""

from tests.hard_knocks.case import Case

_TRAIN = "gshard-train --experiment=test.tiny --logdir=run --mesh=data=2 "

CASES = (
    Case(
        "a coordinator without a number of processes",
        _TRAIN + "--coordinator=localhost:1",
        error="--num_processes and --process_id are missing; --coordinator=localhost:1 "
        "needs all three. Leave all out under Slurm, on Cloud TPU and on GKE, which "
        "set them",
    ),
    Case(
        "a coordinator without a port",
        _TRAIN + "--coordinator=localhost --num_processes=2 --process_id=0",
        error="--coordinator=localhost is not host:port, such as 10.0.0.1:8476",
    ),
    Case(
        "a coordinator at a broken port",
        _TRAIN + "--coordinator=localhost:http --num_processes=2 --process_id=0",
        error="--coordinator=localhost:http is not host:port, such as 10.0.0.1:8476",
    ),
    Case(
        "a coordinator at an impossible port",
        _TRAIN + "--coordinator=localhost:99999 --num_processes=2 --process_id=0",
        error="--coordinator=localhost:99999 is not host:port, such as 10.0.0.1:8476",
    ),
    Case(
        "an empty coordinator",
        _TRAIN + "--coordinator= --num_processes=2 --process_id=0",
        error="--coordinator= is not host:port, such as 10.0.0.1:8476",
    ),
    Case(
        "a process without a coordinator",
        _TRAIN + "--num_processes=2 --process_id=0",
        error="--coordinator is missing; --num_processes=2 --process_id=0 needs all three. "
        "Leave all out under Slurm, on Cloud TPU and on GKE, which set them",
    ),
    Case(
        "a process beyond the last",
        _TRAIN + "--coordinator=localhost:1 --num_processes=2 --process_id=2",
        error="--process_id=2 is out of range: with --num_processes=2, 0 to 1 is expected",
    ),
    Case(
        "a negative process",
        _TRAIN + "--coordinator=localhost:1 --num_processes=2 --process_id=-1",
        error="--process_id=-1 is out of range: with --num_processes=2, 0 to 1 is expected",
    ),
    Case(
        "no processes",
        _TRAIN + "--coordinator=localhost:1 --num_processes=0 --process_id=0",
        error="--num_processes=0 is out of range: at least 1 is expected",
    ),
    Case(
        "a negative number of processes",
        _TRAIN + "--coordinator=localhost:1 --num_processes=-2 --process_id=0",
        error="--num_processes=-2 is out of range: at least 1 is expected",
    ),
    Case(
        "no time for the other processes",
        _TRAIN
        + "--coordinator=localhost:1 --num_processes=2 --process_id=0 --coordinator_timeout=0",
        error="--coordinator_timeout=0: 0 is not a positive integer",
    ),
    Case(
        "a coordinator that is another machine",
        _TRAIN
        + "--coordinator=192.0.2.1:80 --num_processes=2 --process_id=0 --coordinator_timeout=2",
        error="--coordinator=192.0.2.1:80: process 0 cannot open port 80 here at 192.0.2.1 (Cannot "
        "assign requested address); choose a free port of process 0's machine, or another "
        "--coordinator_bind_address",
    ),
    Case(
        "a coordinator that does not answer",
        _TRAIN
        + "--coordinator=localhost:1 --num_processes=2 --process_id=1 --coordinator_timeout=2",
        error="--coordinator=localhost:1 could not be reached within 2 s (Connection "
        "refused); process 0 is expected there",
    ),
    Case(
        "processes that never come",
        _TRAIN
        + "--coordinator=localhost:47123 --num_processes=2 --process_id=0 --coordinator_timeout=2",
        error="--num_processes=2 processes were expected at --coordinator=localhost:47123, "
        "but within 2 s none came with --process_id 1",
    ),
    Case(
        "a cluster under one device's runtime",
        "gshard-train --experiment=test.tiny --logdir=run --runtime=local "
        "--coordinator=localhost:1 --num_processes=2 --process_id=0",
        error="--coordinator=localhost:1 needs --runtime=spmd; the local runtime has one device",
    ),
    Case(
        "a launch without a command",
        "gshard-launch local --hosts=2",
        error="the command to run is missing: gshard-launch local -- gshard-train --logdir=...",
    ),
    Case(
        "a launch with a process id",
        "gshard-launch local --hosts=2 -- gshard-train --process_id=0",
        error="--process_id=0 in the command: agents choose it; leave it out",
    ),
    Case(
        "a launch on hosts that cannot share the mesh",
        "gshard-launch local --hosts=2 -- gshard-train --logdir=run --mesh=data=3",
        error="`mesh=data=3` has 3 devices, which 2 hosts cannot share equally",
    ),
    Case(
        "a launch with fewer hosts and no mesh",
        "gshard-launch local --hosts=2 --min_hosts=1 -- gshard-train --logdir=run",
        error="--min_hosts=1 is less than `max_hosts=2`, which needs --mesh in the command: it "
        "says what fewer hosts can divide",
    ),
    Case(
        "a launch to a Slurm that is not there",
        "gshard-launch slurm -- gshard-train --logdir=run",
        error="sbatch is not there: submit from a machine that has Slurm's commands",
        environment={"PATH": ""},
    ),
    Case(
        "checkpoints of a run that is not there",
        "gshard-checkpoints list --logdir=run",
        error="--logdir=run has no checkpoints",
    ),
)
