# tests: wings/cluster/cluster.py, tools/train.py
"""Checks that gshard-train in two processes of four devices equals one process of eight."""

import pytest

from lingvo_gshard.wings.services.routers.router_records import routers_of_run
from tests.tools import tiny_translation
from tests.tools.train.train_processes import finish, losses, start, train_in_two

_SETTINGS = {
    "input__batch_rows": 8,
    "input__source_length": 32,
    "input__target_length": 32,
    "task__encoder__moe__group_size": 32,
    "task__decoder__moe__group_size": 32,
    "run__checkpoint_every_steps": 3,
    "run__routers__every_steps": 2,
}


@pytest.mark.slow
def test_two_processes_train_like_one_and_resume_anywhere(tmp_path):
    flags = tiny_translation.write(tmp_path, **_SETTINGS)
    mesh = ["--mesh=data=8", "--strategy=expert"]
    alone, together = tmp_path / "alone", tmp_path / "together"

    finish(start([*flags, *mesh, f"--logdir={alone}", "--steps=6"], devices=8))
    main, other = train_in_two([*flags, *mesh, f"--logdir={together}", "--steps=4"])
    assert "Trained 4 steps" in main and "step" not in other
    finish(start([*flags, f"--logdir={together}", "--mesh=data=2,model=2", "--steps=5"], 4))
    finish(start([*flags, f"--logdir={together}", "--runtime=local", "--steps=6"], 1))

    assert losses(together) == pytest.approx(losses(alone), rel=1e-5)
    assert len(losses(together)) == 6
    # Routers were watched by two processes, and by one on another mesh.
    assert [seen(record) for record in routers_of_run(together)] == [
        seen(record) for record in routers_of_run(alone)
    ]


def seen(record):
    """Returns what does not depend on the order of sums."""
    counts = (record.tokens, record.choices, record.kept, record.by_language, record.by_class)
    return record.step, record.layer, *counts
