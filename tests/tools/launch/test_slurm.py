"""Checks batch scripts for Slurm without a Slurm; slurm_cluster.py has a real one."""

import os
import shutil
import subprocess

import pytest

from lingvo_gshard.core import UserError
from lingvo_gshard.tools import launch
from lingvo_gshard.tools.launch.slurm import SlurmOptions, script
from lingvo_gshard.wings.agents.options import AgentOptions


def test_the_script_asks_for_nodes_and_keeps_them():
    slurm = SlurmOptions(time_limit="24:00:00", partition="big", sbatch=("gres=gpu:8", "--mem=0"))
    text = script(slurm, AgentOptions(max_hosts=4, min_hosts=2), ["gshard-train"], "/x")
    settings = [line[8:] for line in text.splitlines() if line.startswith("#SBATCH ")]
    for expected in (
        *("--nodes=4", "--ntasks-per-node=1", "--requeue", "--no-kill", "--signal=B:USR1@180"),
        *(
            "--time=24:00:00",
            "--partition=big",
            "--gres=gpu:8",
            "--mem=0",
            "--output=/x/job-%j.log",
        ),
    ):
        assert expected in settings


def test_the_script_is_a_shell_script_that_keeps_every_argument(tmp_path):
    """A stand-in for srun shows what each agent gets."""
    words = ["gshard-train", "--gin_param=a.b = 'c \"d'", "$HOME", "100%"]
    text = script(SlurmOptions(), AgentOptions(max_hosts=2), words, "/x")
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\nexit 3\n")
    srun.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", text],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3 and not done.stderr
    assert done.stdout.splitlines()[-4:] == words


def test_a_dry_run_submits_nothing(tmp_path, capsys):
    words = ["slurm", "--dry_run", "--", "gshard-train", f"--logdir={tmp_path}/run"]
    assert launch.main(["gshard-launch", *words]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n") and not list(tmp_path.iterdir())


_CONF = """ClusterName=test
SlurmctldHost=localhost
SlurmctldPort=1
AuthType=auth/none
MessageTimeout=1
NodeName=localhost
PartitionName=all Nodes=ALL
"""


def _sbatch_refuses(setting: str, folder, seconds: float) -> bool:
    """Returns whether sbatch itself cannot read a setting, before it asks a controller."""
    (folder / "slurm.conf").write_text(_CONF)
    name, _, value = setting.partition("=")
    (folder / "job.sh").write_text(f'#!/bin/sh\n#SBATCH --{name}="{value}"\ntrue\n')
    try:
        done = subprocess.run(
            ["sbatch", "--test-only", str(folder / "job.sh")],
            env={**os.environ, "SLURM_CONF": str(folder / "slurm.conf")},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        # It has read the setting, and waits for the controller.
        return False
    return f"Invalid --{name} specification" in done.stderr


@pytest.mark.parametrize(
    ("setting", "is_refused"),
    [
        *((f"time={each}", False) for each in ("90", "90:30", "24:00:00", "0", "unlimited")),
        *((f"time={each}", False) for each in ("1-12", "1-12:30", "1-12:30:00", "INFINITE")),
        *((f"time={each}", True) for each in ("1day", "24h", "1:2:3:4", "1-2:3:4:5", "1.5", " 90")),
        *((f"mem={each}", False) for each in ("0", "16000", "16G", "16GB", "1t")),
        *((f"mem={each}", True) for each in ("16Gi", "16.5G", "16 GB", "all")),
    ],
)
def test_what_sbatch_cannot_read_is_refused_before(setting, is_refused, tmp_path):
    slurm = SlurmOptions(sbatch=(setting,))
    if is_refused:
        with pytest.raises(UserError, match="Slurm accepts "):
            script(slurm, AgentOptions(), ["true"], "/x")
    else:
        assert setting.split("=")[1] in script(slurm, AgentOptions(), ["true"], "/x")
    if shutil.which("sbatch"):
        seconds = 60.0 if is_refused else 0.5
        assert _sbatch_refuses(setting, tmp_path, seconds) == is_refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_limit": "1day"}, "`time_limit=1day`: Slurm accepts minutes.*, hours:minutes:sec"),
        ({"partition": "my nodes"}, "`partition=my nodes`: Slurm accepts names without spaces"),
        ({"sbatch": ("account=my group",)}, "`sbatch=account=my group`: .* without spaces"),
        ({"sbatch": ("--mem=16Gi",)}, "`sbatch=mem=16Gi`: Slurm accepts .* such as 16G"),
    ],
)
def test_values_that_slurm_would_refuse_are_named(options, message):
    with pytest.raises(UserError, match=message):
        script(SlurmOptions(**options), AgentOptions(), ["true"], "/x")
