"""Checks the commands for a Cloud TPU."""

import shlex

import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools import launch

_TPU = ["--zone=us-east5-b", "--accelerator_type=v6e-16", "--runtime_version=v2-alpha-tpuv6e"]
_COMMAND = ["--", "gshard-train", "--logdir=gs://me/x", "--gin_param=a.b = 'c d'"]


def test_a_tpu_is_asked_for_prepared_and_used(capsys):
    words = ["tpu_vm", *_TPU, "--spot", "--max_hosts=4", "--project=p", "--dry_run", *_COMMAND]
    assert launch.main(["gshard-launch", *words]) == 0
    create, state, install, train = map(shlex.split, capsys.readouterr().out.splitlines())
    assert create[3:6] == ["queued-resources", "create", "gshard"] and "--spot" in create
    assert state[4] == "describe" and "--project=p" in state
    assert "--worker=all" in install and "jax[tpu]" in install[-1]
    agent = shlex.split(train[-1].removeprefix("--command="))
    assert agent[:2] == ["gshard-launch", "agent"] and agent[-1] == "--gin_param=a.b = 'c d'"
    assert "--meeting_place=gs://me/x/agents" in agent


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([*_TPU[1:], *_COMMAND], "--zone is missing"),
        ([*_TPU, "--max_hosts=4", "--min_hosts=2", *_COMMAND, "--mesh=data=4"], "all of its hosts"),
        ([*_TPU, "--", "gshard-train", "--logdir=runs/x"], "is no bucket"),
    ],
)
def test_mistakes_are_named(words, named):
    with pytest.raises(UserError, match=named):
        launch.main(["gshard-launch", "tpu_vm", "--dry_run", *words])
