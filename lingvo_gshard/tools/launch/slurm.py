"""Submits a job to Slurm: an agent on each node, and a worker of each agent."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

from absl import flags

from lingvo_gshard.core import EXIT_CODES, Options, UserError, is_bucket, objects, option, signals
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.flags.definitions import maker
from lingvo_gshard.tools.flags.options import DRY_RUN, option_flags, read_options, spell_options
from lingvo_gshard.tools.launch.command import read_command
from lingvo_gshard.wings.agents.meeting import shared_secret
from lingvo_gshard.wings.agents.options import AgentOptions

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
    time_limit: str | None = option(None, "Time limit, such as 24:00:00; else the partition's.")
    save_seconds: int = option(
        180, "The workers save so many seconds before the time limit.", minimum=1
    )
    sbatch: tuple[str, ...] = option(
        (), "Another option of sbatch, such as gres=gpu:8, without quotes; may be repeated."
    )
    follow: bool = option(True, "Shows the job's log until it ends.")


define_flags = maker(
    **option_flags(SlurmOptions()),
    **option_flags(AgentOptions()),
    dry_run=DRY_RUN,
    json=output.json_flag("the script, and the number of the job"),
)


def run(values: flags.FlagValues, console: output.Console, words: Sequence[str]) -> int:
    """Runs the subcommand and returns the exit code. Raises UserError for a mistake."""
    (command, options), slurm = read_command(values, words), read_options(values, SlurmOptions)
    command.meshes(options)
    place = str(options.meeting_place)
    folder = os.getcwd() if is_bucket(place) else place
    text = script(slurm, options, words, folder)
    if values.dry_run:
        console.say(text.rstrip())
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
    console.say(f"Submitted job {job}; its log is {log}. scancel {job} ends it")
    output.write_json(values.json, {"script": text, "job": int(job), "log": str(log)})
    return _follow(job, log) if slurm.follow else 0


def script(slurm: SlurmOptions, options: AgentOptions, words: Sequence[str], folder: str) -> str:
    """Returns the batch script, which logs to `folder`. Raises UserError for a wrong setting."""
    if "\\" in folder:
        # sbatch would take the whole name literally, with no number of the job.
        raise UserError(f"{folder!r} has a backslash, which Slurm allows in no name of a log")
    # sbatch fills in patterns that begin with a percent sign.
    log = f"{folder.replace('%', '%%')}/job-%j.log"
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
    own = {"partition": slurm.partition, "time": slurm.time_limit}
    settings += [f"{name}={value}" for name, value in own.items() if value is not None]
    settings += slurm.sbatch
    agent = [sys.executable, "-m", "lingvo_gshard", "launch", "agent"]
    parts = {
        "settings": "\n".join(map(_setting, settings)),
        "keep": shlex.quote(_KEEP_AGENT),
        "agent": shlex.join([*agent, *spell_options(options), "--", *words]),
    }
    # All at once, since arguments of users may have such marks.
    template = objects.text_beside(__file__, "slurm_job.bash")
    return re.sub(r"@(\w+)@", lambda found: parts[found[1]], template)


def _setting(given: str) -> str:
    """Returns an option as a line for sbatch, which reads quotes in its own way, not as a shell."""
    found = _OPTION.fullmatch(given)
    if found is None or _CONTROL.search(given):
        raise UserError(
            f"{given!r} cannot be an option of sbatch; expected NAME or NAME=VALUE, without line "
            "ends and other control characters"
        )
    name, value = found.groups()
    pattern, expected = _ACCEPTED.get(name, (".*", ""))
    if value is not None and not re.fullmatch(pattern, value):
        own = {"time": "time_limit", "partition": "partition"}.get(name, f"sbatch={name}")
        raise UserError(f"`{own}={value}`: Slurm accepts {expected}")
    if value is None or _PLAIN.fullmatch(value):
        return f"#SBATCH --{name}" + (f"={value}" if value is not None else "")
    # Within quotes a backslash keeps the next character. Outside of quotes it does not keep spaces.
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH --{name}="{quoted}"'


# The values that sbatch(1) accepts for options that are easily written in another way.
_ACCEPTED = {
    "time": (
        r"(?i)\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE",
        "minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]] or UNLIMITED",
    ),
    "mem": (r"(?i)\d+([KMGT]B?)?", "a whole number and K, M, G or T, such as 16G"),
    **dict.fromkeys(("partition", "account", "qos"), (r"\S+", "names without spaces")),
}
_OPTION = re.compile(r"(?:--)?([A-Za-z][A-Za-z0-9-]*)(?:[= ](.*))?", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_PLAIN = re.compile(r"[\w./:,=@%+-]+", re.ASCII)

# An agent that was killed, for example for want of memory, is started again. The agent
# handles requests to stop, so the shell around the agent ignores them.
_KEEP_AGENT = """trap : USR1 TERM
while "$@"; code=$?; [ $code -eq 137 ]; do :; done
exit $code"""


def _follow(job: str, log: pathlib.Path) -> int:
    """Prints a job's log until the job ends. Returns its exit code."""
    place = 0
    with signals.StopRequest() as stop:
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
    # At the beginning of a line, and not in the name of the job or of its files.
    shown = _run(["scontrol", "show", "job", job])
    state = re.search(r"^ *JobState=(\w+)", shown, re.MULTILINE)
    code = re.search(r"^ *Requeue=.* ExitCode=(\d+):", shown, re.MULTILINE)
    if state is None or code is None:
        raise UserError(f"scontrol show job {job} says no JobState and ExitCode; they are needed")
    return state[1], int(code[1])


def _run(command: Sequence[str]) -> str:
    """Returns what a command of Slurm prints. Raises UserError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{shlex.join(command)}: {done.stderr.strip() or 'failed'}")
    return done.stdout.strip()
