# tests: wings/services/determinism.py, api/replay.py
"""Tests that a replayed step is equal to its record, and that every kind of difference is named."""

import io
import json
import shutil

import numpy as np
import pytest
import rich.console

from lingvo_gshard.api.backend import Backend
from lingvo_gshard.api.options import RuntimeOptions
from lingvo_gshard.api.replay import replay
from lingvo_gshard.api.training import train
from lingvo_gshard.tools import train as command
from lingvo_gshard.tools.console import startup
from lingvo_gshard.wings.services.determinism import batch_digest
from tests import tiny
from tests.services import spiked
from tests.services.determinism.flipped import FlippingRuntime
from tests.tools.train.train_processes import train_in_two

QUIET = rich.console.Console(quiet=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 14 steps with checkpoints of steps 8, 12 and 14."""
    path = tmp_path_factory.mktemp("trained")
    train(tiny.experiment_params(14), path, runtime="local", console=QUIET)
    return path


def replayed(path, step, **options):
    """Returns what a replay found, and what it said."""
    screen = io.StringIO()
    console = rich.console.Console(file=screen, width=200)
    found = replay(path, step, options=RuntimeOptions(**options), console=console)
    return found, screen.getvalue()


def with_row(trained, path, step, **values):
    """Returns a copy of the run whose record of a step has other values."""
    shutil.copytree(trained, path)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rows[step - 1].update(values)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_step_with_a_checkpoint_is_equal_in_metrics_and_digests(trained):
    before = {path: path.stat().st_mtime_ns for path in sorted(trained.rglob("*"))}
    found, said = replayed(trained, 14)
    assert found.is_equal and (found.step, found.checkpoint) == (14, 12)
    assert "Replaying steps 13 to 14 from the checkpoint of step 12\n" in said
    assert "step 14 is equal to what the run recorded, in every bit: batch, loss " in said
    assert said.endswith("the digests of all arrays of the checkpoint of step 14\n")
    # The run's directory is only read.
    assert {path: path.stat().st_mtime_ns for path in sorted(trained.rglob("*"))} == before


@pytest.mark.slow
def test_the_next_step_tells_of_the_weights_where_there_is_no_checkpoint(trained):
    found, said = replayed(trained, 11)
    assert found.is_equal and found.checkpoint == 8
    assert said.endswith("the weights, by the loss of step 12\n")


@pytest.mark.slow
def test_another_loss_batch_or_later_loss_is_named(trained, tmp_path):
    other = float(np.nextafter(np.float32(1.25), np.float32(2)))
    found, said = replayed(with_row(trained, tmp_path / "loss", 13, loss=other), 14)
    assert found.differs_at == 13
    assert "step 13 differs from what the run recorded: loss is " in said
    assert f", and {other!r} was recorded" in said
    found, said = replayed(with_row(trained, tmp_path / "batch", 10, batch_digest=1.0), 11)
    assert found.differs_at == 10 and found.differences == ["its batch is another one"]
    found, said = replayed(with_row(trained, tmp_path / "next", 12, loss=other), 11)
    assert found.differs_at == 11 and found.differences[0].startswith("of step 12, the loss is ")


@pytest.mark.slow
@pytest.mark.parametrize(("call", "at"), [(1, 14), (2, 14)])
def test_a_bit_that_flips_in_the_replay_is_found(trained, monkeypatch, call, at):
    """The prepared device flips a bit of a weight after the first replayed step, or the last."""
    plain = Backend.make_runtime
    monkeypatch.setattr(
        Backend,
        "make_runtime",
        lambda *args: FlippingRuntime(plain(*args), "theta.hidden.w", device=0, call=call),
    )
    found, said = replayed(trained, 14)
    assert found.differs_at == at
    words = "loss is " if call == 1 else "other digests than in the checkpoint: theta.hidden.w"
    assert f"step 14 differs from what the run recorded: {words}" in said


@pytest.mark.slow
def test_another_mesh_is_named_as_a_reason(trained):
    found, said = replayed(trained, 14, mesh="data=2")
    assert not found.is_equal
    assert "The bits may differ for another reason: 1 CPU then, 2 CPU devices as data=2 now" in said


@pytest.mark.slow
def test_a_run_that_rolled_back_is_replayed_without_the_skipped_batches(tmp_path):
    params = spiked.experiment(spiked.SpikedInput)
    train(params, tmp_path, runtime="local", console=QUIET)
    assert len((tmp_path / "roll_backs.jsonl").read_text().splitlines()) == 2
    found, _ = replayed(tmp_path, 27)
    assert found.is_equal and found.checkpoint == 24


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (15, "replay_step=15`: .*metrics.jsonl has no row of this step; its last row up to .* 14"),
        (8, "replay_step=8`: .* no checkpoint before this step; the oldest .* is of step 8. run"),
    ],
)
def test_steps_that_cannot_be_replayed_are_named(trained, step, message):
    with pytest.raises(ValueError, match=message):
        replay(trained, step, console=QUIET)


def test_the_command_refuses_what_changes_the_run(trained, capsys):
    flags = [f"--logdir={trained}", "--replay_step=9", "--seed=3"]
    assert startup.guarded(command.NAME, command.main)([command.NAME, *flags]) == 1
    assert "--seed=3 cannot be combined with --replay_step=9: a run is" in capsys.readouterr().err


@pytest.mark.slow
def test_the_exit_code_is_2_if_a_step_differs(trained, tmp_path):
    changed = with_row(trained, tmp_path / "changed", 14, loss=1.5)
    for path, code in ((trained, 0), (changed, 2)):
        report = tmp_path / f"{code}.json"
        flags = [f"--logdir={path}", "--replay_step=14", f"--json={report}"]
        assert command.main([command.NAME, *flags]) == code
        assert json.loads(report.read_text())["is_equal"] == (code == 0)


def test_a_digest_differs_for_other_values_names_shapes_and_types():
    batch = {"x": np.arange(6, dtype=np.int32).reshape(2, 3), "y": np.ones(2, np.float32)}
    others = [
        {**batch, "y": np.array([1, 2], np.float32)},
        {"z": batch["x"], "y": batch["y"]},
        {**batch, "x": batch["x"].reshape(3, 2)},
        {**batch, "x": batch["x"].astype(np.uint32)},
        {"x": batch["x"]},
    ]
    digests = {batch_digest(one) for one in (batch, *others)}
    assert len(digests) == 6
    assert batch_digest({"y": batch["y"], "x": np.asfortranarray(batch["x"])}) in digests


@pytest.mark.slow
def test_two_processes_compute_steps_twice_and_replay_them(tmp_path):
    mesh = [f"--logdir={tmp_path}", "--mesh=data=8", "--strategy=fsdp"]
    experiment = "--experiment=tests.services.spiked.without"
    main, other = train_in_two([experiment, *mesh, "--steps=14", "--check_determinism_every=5"])
    assert "step 5: computed twice in " in main and "equal in every bit on 8 devices" in main
    main, other = train_in_two([*mesh, "--replay_step=14", "--import=tests"])
    assert "step 14 is equal to what the run recorded, in every bit: batch, loss " in main
    assert "replay" not in other.lower()
