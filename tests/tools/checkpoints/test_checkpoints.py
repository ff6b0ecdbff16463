# tests: tools/checkpoints/, wings/services/inventory.py
# tests: training/run/checkpoint/run_handler.py, tools/console/subcommands.py
"""Checks gshard-checkpoints on runs whose state the test has written."""

import json
import shutil

import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools import checkpoints
from lingvo_gshard.training.run.checkpoint.run_item import Best
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from lingvo_gshard.training.run.logdir import Logdir
from tests import tiny
from tests.training.checkpoint.test_store import assert_holds, make_state


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run with the checkpoints 1 to 5, of which the second is the best."""
    logdir = Logdir(tmp_path_factory.mktemp("runs") / "run")
    params = tiny.experiment_params()
    with logdir.claim(params):
        store = CheckpointStore(logdir.checkpoints, keep=9)
        for step in range(1, 6):
            best = Best("dev/loss", 1.0, min(step, 2))
            store.save(step, make_state(step), {"index": step}, params.to_text(), best=best)
        store.close()
    return logdir.place


@pytest.fixture
def run(written, tmp_path):
    return shutil.copytree(written, tmp_path / "run")


def call(*words: object) -> int:
    return checkpoints.main(["gshard-checkpoints", *map(str, words)])


def report(capsys, *words: object):
    capsys.readouterr()
    call(*words, "--json")
    return json.loads(capsys.readouterr().out)


def damage(run, step: int) -> None:
    """Changes a byte in the largest file of a checkpoint's weights."""
    files = [path for path in (run / "checkpoints" / str(step)).rglob("d/*") if path.is_file()]
    path = max(files, key=lambda one: one.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_all_checkpoints_are_listed_with_their_sizes(run, capsys):
    rows = report(capsys, "list", f"--logdir={run}")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in rows if row["is_best"]] == [2]
    files = [path for path in (run / "checkpoints" / "3").rglob("*") if path.is_file()]
    assert rows[2]["files"] == len(files)
    assert rows[2]["bytes"] == sum(path.stat().st_size for path in files)
    assert not any(row["problem"] for row in rows)


def test_a_damaged_checkpoint_is_found_and_left_as_it_is(run, capsys):
    assert call("verify", f"--logdir={run}") == 0
    damage(run, 3)
    capsys.readouterr()
    assert call("verify", f"--logdir={run}") == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith(": intact")] == [
        f"step {step}: intact" for step in (1, 2, 4, 5)
    ]
    assert (run / "checkpoints" / "3").is_dir()
    assert call("verify", f"--logdir={run}", "--step=4") == 0
    (run / "checkpoints" / "4" / "run" / "params.txt").write_text("x")
    rows = report(capsys, "list", f"--logdir={run}")
    assert "params.txt is damaged" in rows[3]["problem"]


def test_older_checkpoints_are_deleted_but_not_the_best(run, capsys):
    assert report(capsys, "prune", f"--logdir={run}", "--keep=2", "--dry_run") == [1, 3]
    assert len(report(capsys, "list", f"--logdir={run}")) == 5
    assert report(capsys, "prune", f"--logdir={run}", "--keep=2") == [1, 3]
    assert [row["step"] for row in report(capsys, "list", f"--logdir={run}")] == [2, 4, 5]
    assert report(capsys, "prune", f"--logdir={run}", "--keep=2") == []
    assert not (run / "run.lock").exists()


def test_a_run_that_trains_is_not_pruned(run):
    with Logdir(run).claim(tiny.experiment_params()):
        with pytest.raises(UserError, match="is in use by process"):
            call("prune", f"--logdir={run}", "--keep=1")


def test_a_copy_is_a_run_with_the_same_state(run, tmp_path, capsys):
    target = tmp_path / "kept" / "copy"
    copied = report(capsys, "copy", f"--logdir={run}", f"--output={target}")
    assert copied["step"] == 2
    store = CheckpointStore(Logdir(target).checkpoints, writable=False)
    assert_holds(store.restore(), 2)
    store.close()
    assert Logdir(target).read_params().to_text() == Logdir(run).read_params().to_text()
    assert call("verify", f"--logdir={target}") == 0
    call("copy", f"--logdir={run}", f"--output={target}", "--checkpoint=newest")
    assert [row["step"] for row in report(capsys, "list", f"--logdir={target}")[-2:]] == [2, 5]


def test_a_copy_replaces_nothing(run, tmp_path):
    target = tmp_path / "copy"
    call("copy", f"--logdir={run}", f"--output={target}")
    with pytest.raises(UserError, match="has a checkpoint of step 2 already"):
        call("copy", f"--logdir={run}", f"--output={target}")
    text = (target / "params.txt").read_text()
    (target / "params.txt").write_text(text.replace("run.steps : ", "run.steps : 9"))
    with pytest.raises(UserError, match="holds another run"):
        call("copy", f"--logdir={run}", f"--output={target}", "--checkpoint=5")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["list"], "--logdir is missing"),
        (["list", "--logdir=nowhere"], "has no checkpoints"),
        (["copy", "--logdir={run}"], "--output is missing"),
        (["verify", "--logdir={run}", "--step=7"], "has the checkpoints 1, 2, 3, 4, 5"),
    ],
)
def test_mistakes_are_named(run, words, named):
    with pytest.raises(UserError, match=named):
        call(*(word.format(run=run) for word in words))
