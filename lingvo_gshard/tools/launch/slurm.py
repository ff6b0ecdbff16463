"""Submits a job to Slurm: an agent on each node, and a worker of each agent.

    gshard-launch slurm --max_hosts=4 --min_hosts=2 --time_limit=24:00:00 -- \\
        gshard-train --experiment=translation.quickstart --logdir=/shared/runs/big \\
        --mesh=data=32 --strategy=expert

writes a batch script beside the meeting place of the agents, submits it and follows its log. Ctrl-C
ends following, not the job. --dry_run prints the script and submits nothing.

Some time before the time limit Slurm signals the job: the workers save, and the job is requeued and
goes on. So it does when Slurm preempts it. When a node fails, the job keeps its other nodes, and
the agents go on with them if --min_hosts allows. Options of your own for sbatch, such as the GPUs
of a node, are given with --sbatch.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

import rich.console
from absl import flags

from lingvo_gshard.agents.meeting import shared_secret
from lingvo_gshard.agents.options import AgentOptions
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files.stores import is_bucket
from lingvo_gshard.core.options import Options, option
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.flags.options import (
    define_dry_run,
    define_option_flags,
    read_options,
    spell_options,
)
from lingvo_gshard.tools.launch.command import WorkerCommand
from lingvo_gshard.training.run.signals import EXIT_CODES, StopRequest

_SCRIPT = "job.sh"
_POLL_SECONDS = 1.0
# States of jobs that Slurm does not run again by itself.
_ENDED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY")
) | {"TIMEOUT"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmOptions(Options):
    """Options of a job under Slurm."""

    job_name: str = option("gshard", "Name of the job.")
    partition: str | None = option(None, "Partition; by default Slurm's.")
    time_limit: str | None = option(
        None, "Time limit, such as 24:00:00; by default the partition's."
    )
    save_seconds: int = option(
        180, "The workers save so many seconds before the time limit.", minimum=1
    )
    sbatch: tuple[str, ...] = option(
        (), "Another option of sbatch, such as gres=gpu:8; may be repeated."
    )
    follow: bool = option(True, "Shows the job's log until it ends.")


def define_flags() -> flags.FlagValues:
    """Returns this subcommand's flags."""
    values = flags.FlagValues()
    define_option_flags(values, SlurmOptions())
    define_option_flags(values, AgentOptions())
    define_dry_run(values)
    output.define_json_flag(values, "the script, and the number of the job")
    return values


def run(values: flags.FlagValues, console: rich.console.Console, words: Sequence[str]) -> int:
    """Runs the subcommand and returns the exit code. Raises UserError for a mistake."""
    command = WorkerCommand(words)
    options, slurm = read_options(values, AgentOptions), read_options(values, SlurmOptions)
    options = dataclasses.replace(options, meeting_place=command.meeting_place(options))
    command.meshes(options)
    place = str(options.meeting_place)
    folder = os.getcwd() if is_bucket(place) else place
    text = script(slurm, options, words, f"{folder}/job-%j.log")
    if values.dry_run:
        output.say(console, text.rstrip())
        output.write_json(values.json, {"script": text})
        return 0
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not there: submit from a machine that has Slurm's commands")
    # Before the nodes, which would all want to make it.
    shared_secret(place)
    path = pathlib.Path(folder) / _SCRIPT
    path.write_text(text, encoding="utf-8")
    job = _run(["sbatch", "--parsable", str(path)]).partition(";")[0]
    log = pathlib.Path(f"{folder}/job-{job}.log")
    output.say(console, f"Submitted job {job}; its log is {log}. scancel {job} ends it")
    output.write_json(values.json, {"script": text, "job": int(job), "log": str(log)})
    return _follow(job, log) if slurm.follow else 0


def script(slurm: SlurmOptions, options: AgentOptions, words: Sequence[str], log: str) -> str:
    """Returns the batch script.

    Args:
      slurm: options of the job.
      options: options of the agents.
      words: the command of a worker.
      log: where the job writes; %j is its number.
    """
    settings = [
        f"job-name={slurm.job_name}",
        # A range of nodes would get its lower end, however many are idle.
        f"nodes={options.max_hosts}",
        "ntasks-per-node=1",
        f"output={log}",
        "open-mode=append",
        "requeue",
        "no-kill",
        f"signal=B:USR1@{slurm.save_seconds}",
    ]
    if slurm.partition is not None:
        settings.append(f"partition={slurm.partition}")
    if slurm.time_limit is not None:
        settings.append(f"time={slurm.time_limit}")
    settings += [one.removeprefix("--") for one in slurm.sbatch]
    agent = [sys.executable, "-m", "lingvo_gshard", "launch", "agent"]
    return _TEMPLATE.format(
        settings="\n".join(f"#SBATCH --{one}" for one in settings),
        keep=shlex.quote(_KEEP_AGENT),
        agent=shlex.join([*agent, *spell_options(options), "--", *words]),
    )


# An agent that was killed, for example for want of memory, is started again. The agent
# handles requests to stop, so the shell around the agent ignores them.
_KEEP_AGENT = """trap : USR1 TERM
while "$@"; code=$?; [ $code -eq 137 ]; do :; done
exit $code"""

_TEMPLATE = """\
#!/bin/bash
{settings}

# Slurm signals this shell before the time limit and when it preempts the job. The agents have the
# workers save.
stop() {{
    reason=$1
    scancel --signal=USR1 "$SLURM_JOB_ID"
}}
trap 'stop limit' USR1
trap 'stop preempted' TERM

# A job that is queued again may get fewer nodes than it first asked for.
srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=0 --no-kill --wait=0 \\
    bash -c {keep} agent \\
    {agent} &
agents=$!
# A signal ends `wait` early.
while wait "$agents"; code=$?; kill -0 "$agents" 2>/dev/null; do :; done

if [ "$reason" = limit ] && [ "$code" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _follow(job: str, log: pathlib.Path) -> int:
    """Prints a job's log until the job ends. Returns its exit code."""
    place = 0
    with StopRequest() as stop:
        stop.finishing = True
        while True:
            state, code = _state(job)
            if log.exists():
                with log.open("rb") as file:
                    file.seek(place)
                    content = file.read()
                place += len(content)
                sys.stdout.write(content.decode("utf-8", "replace"))
                sys.stdout.flush()
            if state in _ENDED:
                return code or (0 if state == "COMPLETED" else 1)
            if stop.requested:
                print(f"Job {job} goes on; scancel {job} ends it", file=sys.stderr)
                return EXIT_CODES[stop.requested]
            time.sleep(_POLL_SECONDS)


def _state(job: str) -> tuple[str, int]:
    """Returns the state of a job and its exit code."""
    words = _run(["scontrol", "--oneliner", "show", "job", job]).split()
    found = dict(word.split("=", 1) for word in words if "=" in word)
    return found["JobState"], int(found["ExitCode"].partition(":")[0])


def _run(command: Sequence[str]) -> str:
    """Returns what a command of Slurm prints. Raises UserError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{shlex.join(command)}: {done.stderr.strip() or 'failed'}")
    return done.stdout.strip()
