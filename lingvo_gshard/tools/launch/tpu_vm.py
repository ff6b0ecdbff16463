"""Starts a job on the hosts of a Cloud TPU, which is asked for if it is not there."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence

from absl import flags

from lingvo_gshard.core import Options, UserError, is_bucket, option
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.flags.definitions import maker
from lingvo_gshard.tools.flags.options import DRY_RUN, option_flags, read_options, spell_options
from lingvo_gshard.tools.launch.command import read_command
from lingvo_gshard.wings.agents.options import AgentOptions

_POLL_SECONDS = 30.0
_READY, _GONE = "ACTIVE", ("FAILED", "SUSPENDED", "SUSPENDING")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuVmOptions(Options):
    """A Cloud TPU."""

    tpu_name: str = option("gshard", "Name of the TPU and of its queued resource.")
    zone: str | None = option(None, "Zone of the TPU; necessary.")
    project: str | None = option(None, "Project; by default gcloud's.")
    accelerator_type: str | None = option(None, "Type of the TPU, such as v6e-16; necessary.")
    runtime_version: str | None = option(
        None, "Software of the hosts, such as v2-alpha-tpuv6e; necessary."
    )
    spot: bool = option(False, "Asks for a TPU that may be preempted, at a lower price.")
    package: str = option(
        "lingvo_gshard[gcs]", "What pip installs on each host, with jax[tpu]; '' installs nothing."
    )


define_flags = maker(
    **option_flags(TpuVmOptions()),
    **option_flags(AgentOptions()),
    dry_run=DRY_RUN,
    json=output.json_flag("the commands"),
)


def run(values: flags.FlagValues, console: output.Console, words: Sequence[str]) -> int:
    """Runs the subcommand and returns the exit code. Raises UserError for a mistake."""
    (_, options), tpu = read_command(values, words), read_options(values, TpuVmOptions)
    # The chips of a slice start on all hosts together: no host can check its own.
    options = dataclasses.replace(options, check_after_failures=0)
    steps = commands(tpu, options, words)
    output.write_json(values.json, {"commands": steps})
    if values.dry_run:
        for step in steps.values():
            console.say(shlex.join(step))
        return 0
    if shutil.which("gcloud") is None:
        raise UserError(
            "gcloud is not there: start from a machine that has Google Cloud's commands"
        )
    _obtain(steps, console)
    for name in ("install", "train"):
        code = subprocess.run(steps[name], check=False).returncode if name in steps else 0
        if code:
            return code
    return 0


def commands(
    tpu: TpuVmOptions, options: AgentOptions, words: Sequence[str]
) -> dict[str, list[str]]:
    """Returns the commands of gcloud by purpose. Raises UserError if an option is missing."""
    for name in ("zone", "accelerator_type", "runtime_version"):
        if getattr(tpu, name) is None:
            raise UserError(f"--{name} is missing: gcloud needs it")
    if options.fewest != options.max_hosts:
        raise UserError(
            f"`min_hosts={options.min_hosts}` is not `max_hosts={options.max_hosts}`: a TPU slice "
            "runs with all of its hosts"
        )
    if not is_bucket(str(options.meeting_place)):
        raise UserError(
            f"`meeting_place={options.meeting_place}` is no bucket, where the hosts of a TPU meet"
        )
    place = [f"--zone={tpu.zone}", *([f"--project={tpu.project}"] if tpu.project else [])]
    tpus = ["gcloud", "compute", "tpus"]
    resource, host = [*tpus, "queued-resources"], [*tpus, "tpu-vm", "ssh", tpu.tpu_name]
    asked = [
        *(f"--node-id={tpu.tpu_name}", f"--accelerator-type={tpu.accelerator_type}"),
        f"--runtime-version={tpu.runtime_version}",
        *(["--spot"] if tpu.spot else []),
    ]
    agent = ["gshard-launch", "agent", *spell_options(options), "--", *words]
    found = {
        "create": [*resource, "create", tpu.tpu_name, *place, *asked],
        "state": [*resource, "describe", tpu.tpu_name, *place, "--format=value(state.state)"],
    }
    everywhere = [*host, *place, "--worker=all"]
    if tpu.package:
        pip = ["python3", "-m", "pip", "install", tpu.package, "jax[tpu]"]
        found["install"] = [*everywhere, f"--command={shlex.join(pip)}"]
    return {**found, "train": [*everywhere, f"--command={shlex.join(agent)}"]}


def _obtain(steps: dict[str, list[str]], console: output.Console) -> None:
    """Asks for the TPU unless it was asked for before, and waits until it is there."""
    asked = False
    while (state := _state(steps["state"])) != _READY:
        if state in _GONE:
            raise UserError(f"the TPU is {state.lower()}; delete its queued resource and try again")
        if not state:
            if asked:
                raise UserError("gcloud does not know the TPU that it was asked for")
            if subprocess.run(steps["create"], check=False).returncode:
                raise UserError("gcloud refused the TPU; see above")
            asked = True
        console.say(f"Waiting for the TPU: {state.lower() or 'asked for'}")
        time.sleep(_POLL_SECONDS)


def _state(command: Sequence[str]) -> str:
    """Returns the state of the queued resource; "" if there is none."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()
