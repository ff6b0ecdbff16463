"""Checks batch scripts for Slurm without a Slurm; slurm_cluster.py has a real one."""

import subprocess

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
