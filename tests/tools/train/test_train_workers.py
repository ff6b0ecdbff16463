# tests: wings/local_updates/runtime.py, tools/train.py
"""Tests gshard-train with local updates: rejected options, several processes, resuming."""

import pytest

from lingvo_gshard.tools import train
from lingvo_gshard.tools.console import startup
from tests.tools import tiny_translation
from tests.tools.train.train_processes import finish, losses, start, train_in_two

_EVERY = "--gin_param=step.local_updates.every = 2"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([_EVERY], "step.local_updates.every=2 needs an axis worker of --mesh, as in --mesh="),
        ([_EVERY, "--mesh=data=8"], "--mesh=data=8 has none"),
        (["--mesh=worker=4,data=2"], "has an axis worker, which the strategy does not use. Set"),
        ([_EVERY, "--mesh=worker=5,data=1"], "is no multiple of the 5 workers of --mesh=worker=5"),
        ([_EVERY, "--mesh=worker=8"], "--strategy=expert needs axis 'data', which --mesh=worker=8"),
    ],
)
def test_incompatible_options_are_rejected(capsys, tmp_path, flags, message):
    flags = [f"--logdir={tmp_path}/run", "--experiment=translation.quickstart", *flags]
    assert startup.guarded(train.NAME, train.main)([train.NAME, *flags]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_of_two_workers_train_like_one_of_four(tmp_path):
    settings = {"input__batch_rows": 8, "run__checkpoint_every_steps": 3}
    flags = [*tiny_translation.write(tmp_path, **settings), _EVERY]
    mesh = ["--mesh=worker=4,data=2", "--strategy=expert"]
    alone, together = tmp_path / "alone", tmp_path / "together"

    said = finish(start([*flags, *mesh, f"--logdir={alone}", "--steps=5"], devices=8))
    assert "local updates: 4 workers synchronize every 2 steps and exchange" in said
    main, other = train_in_two([*flags, *mesh, f"--logdir={together}", "--steps=3"])
    assert "Trained 3 steps" in main and "step" not in other
    finish(start([*flags, *mesh, f"--logdir={together}", "--steps=5"], devices=8))
    assert losses(together) == pytest.approx(losses(alone), rel=1e-5)
    assert len(losses(together)) == 5
