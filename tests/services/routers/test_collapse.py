# tests: wings/services/routers/watch.py, wings/services/routers/router_records.py
"""Trains the prepared case of docs/experts.md: a router that collapses is found and named."""

import importlib
import itertools
import pathlib
import sys

import numpy as np
import pytest

from lingvo_gshard.tools import experts, train
from lingvo_gshard.training.run.monitoring.metrics import METRICS_FILE
from lingvo_gshard.wings.services.metrics_rows import rows_until
from lingvo_gshard.wings.services.routers.router_records import ROUTERS_FILE, routers_of_run
from tests.test_docs import write_files
from tests.tools import tiny_translation

DOCS = pathlib.Path(__file__).resolve().parents[3] / "docs"
BROKEN, SOUND = "decoder.layers[0].feed_forward", "encoder.layers[0].feed_forward"
STEPS, EVERY = 20, 4


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Returns the flags of a small model whose decoder has the router of the page."""
    folder = tmp_path_factory.mktemp("collapsed")
    written = write_files((DOCS / "experts.md").read_text(encoding="utf-8"), folder)
    assert folder / "collapsed.py" in written
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield [
        *tiny_translation.write(folder),
        "--gin_param=task.decoder.moe.router = @collapsed.Biased",
        "--gin_param=task.decoder.moe.router.auxiliary_loss_weight = 0.0",
        f"--gin_param=run.routers.every_steps = {EVERY}",
        f"--gin_param=step.schedule.total_steps = {STEPS}",
        "--runtime=local",
    ]
    sys.path.remove(str(folder))


def trained(flags, logdir, *steps):
    """Trains to each of these steps in turn, resuming between them."""
    for last in steps:
        assert train.main(["gshard-train", *flags, f"--logdir={logdir}", f"--steps={last}"]) == 0
    return logdir


@pytest.fixture(scope="module")
def run(flags, tmp_path_factory):
    """Returns the directory of a whole run, and what it printed."""
    logdir = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("rich.console.Console.print", lambda self, *x, **_: lines.extend(map(str, x)))
        trained(flags, logdir, STEPS)
    return logdir, lines


@pytest.mark.slow
def test_the_layer_is_named_with_step_share_and_advice(run):
    _, lines = run
    warnings = [line for line in lines if "collapsed:" in line]
    assert len(warnings) == 1
    start = f"Warning: step {EVERY}: the router of {BROKEN} has collapsed: expert 3 gets 9"
    assert warnings[0].startswith(start) and warnings[0].endswith("an even share is 12.5%")
    assert any("the auxiliary_loss_weight of its Biased is 0" in line for line in lines)
    deaths = [line for line in lines if "had no token since" in line]
    assert deaths and all(f"{BROKEN}: expert" in line for line in deaths)
    assert deaths[0].endswith(f"since step {EVERY}, in 4 watched steps")
    assert f"  {BROKEN}  collapsed since step {EVERY}" in lines


@pytest.mark.slow
def test_records_agree_with_the_metrics_of_their_steps(run):
    logdir, _ = run
    found = routers_of_run(logdir)
    steps = range(EVERY, STEPS + 1, EVERY)
    assert [(r.step, r.layer) for r in found] == list(itertools.product(steps, (SOUND, BROKEN)))
    rows = dict(rows_until(logdir / METRICS_FILE, STEPS))
    for r in found:
        row = {n.removeprefix(f"{r.layer}/"): x for n, x in rows[r.step].items()}
        np.testing.assert_allclose(r.dropped_share, row["dropped_share"], atol=1e-6)
        np.testing.assert_allclose(r.token_entropy, row["router_entropy"], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(r.balance_loss, row["auxiliary_loss"], rtol=1e-4)
        assert r.kept.count(0) == row["dead_experts"]
        assert sum(map(sum, r.by_class.values())) == sum(r.choices)
        assert set(r.by_class) <= {
            "first piece",
            "continuation",
            "punctuation",
            "digits",
            "byte",
        } | {*("start of text", "end of sentence", "unknown")}
        assert sum(map(sum, r.by_language.values())) == sum(r.choices) and len(r.by_language) > 1
    assert found[-1].busiest[0] == 3 and found[-1].busiest[1] > 0.9 and found[-1].dead_since
    assert found[-2].busiest[1] < 0.6 and not found[-2].dead_since


@pytest.mark.slow
def test_tensorboard_has_curves_and_pictures(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run[0] / "events"))
    events.Reload()
    tags = events.Tags()["tensors"]
    for layer in (SOUND, BROKEN):
        for name in ("busiest_share", "load_entropy", "token_entropy", "dead_experts"):
            points = events.Tensors(f"routers/{layer}/{name}")
            assert [point.step for point in points] == list(range(EVERY, STEPS + 1, EVERY))
        for name in ("load", "by_language", "by_class"):
            assert f"routers/{layer}/{name}" in tags
    # One file: TensorBoard reads the newest one of a directory only.
    assert len(list((run[0] / "events").iterdir())) == 1
    picture = events.Tensors(f"routers/{BROKEN}/load")[-1].tensor_proto.string_val
    assert picture[0] == str(5 * 16).encode() and picture[2].startswith(b"\x89PNG")


@pytest.mark.slow
def test_watched_shows_the_layer(run, capsys):
    assert experts.main(["gshard-experts", "watched", f"--logdir={run[0]}"]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if BROKEN in x]
    assert "Biased" in line and " 3 (" in line and f" since {EVERY}" in line and "█████" in line


@pytest.mark.slow
def test_a_resumed_run_writes_the_same_records(run, flags, tmp_path):
    resumed = trained(flags, tmp_path / "resumed", 10, STEPS)
    assert (resumed / ROUTERS_FILE).read_bytes() == (run[0] / ROUTERS_FILE).read_bytes()
