# tests: tools/experts/place.py, wings/fine_tuning/surgery/expert_placement.py
"""Runs gshard-experts place: the same function with experts in another order, and mistakes."""

import json

import msgspec
import numpy as np
import pytest

from lingvo_gshard.api.run import load
from lingvo_gshard.tools import experts
from lingvo_gshard.tools.console import startup
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from lingvo_gshard.wings.evaluation.likelihood import measure_likelihood
from lingvo_gshard.wings.fine_tuning.surgery import expert_placement
from lingvo_gshard.wings.planning.loads.file import Loads
from lingvo_gshard.wings.planning.loads.rating import rate
from lingvo_gshard.wings.published_layers.routers import GroupLimitedRouter, HashRouter
from lingvo_gshard.wings.services.routers.counts import watched_layers
from tests.planning import example_plan
from tests.planning.loads.example_loads import choose, dropless, record_of
from tests.runtime import tiny_translation

PATHS = [f"{side}.layers[0].feed_forward" for side in ("encoder", "decoder")]


def plan_file(path, replicas=0, paths=PATHS):
    """Writes a plan of eight experts on four devices under the example's loads."""
    plan = example_plan.as_plan(example_plan.example_plan())
    layers = [dropless(path=path) for path in paths]
    records = {name: [record_of(choose(i), 1, 6, name)] for i, name in enumerate(paths)}
    found = rate(plan, layers, Loads("load.json", records), replicas)
    path.write_text(msgspec.structs.replace(plan, loads=found).to_json())
    return path, {layer.layer: layer.placement for layer in found.layers}


def run_here(capsys, *flags):
    capsys.readouterr()
    name = "gshard-experts"
    code = startup.guarded(name, experts.main)([name, "place", *map(str, flags)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def scores_of(logdir):
    model = load(logdir).model
    return measure_likelihood(model.runtime, model.input, model.input.rows("test"))


def arrays_of(logdir):
    store = CheckpointStore(logdir / "checkpoints", writable=False)
    checkpoint = store.restore()
    store.close()
    return checkpoint


@pytest.mark.slow
def test_a_placed_run_computes_the_same_function(trained_logdir, tmp_path, capsys):
    path, placement = plan_file(tmp_path / "plan.json")
    output, file = tmp_path / "placed", tmp_path / "placed.json"
    flags = f"--logdir={trained_logdir}", f"--plan={path}", f"--output={output}"
    code, out, err = run_here(capsys, *flags, f"--json={file}")
    assert (code, err) == (0, "")
    written = json.loads(file.read_text())
    given, placed = arrays_of(trained_logdir), arrays_of(output)
    assert placed.step == written["step"] == given.step and placed.position == given.position
    for layer, devices in placement.items():
        order = sum(devices, [])
        assert written["experts"][layer] == order != sorted(order)
        assert f"{layer}: experts {', '.join(map(str, devices[0]))} | " in out
        for name, axis in (("experts.w_in", 0), ("experts.w_out", 0), ("router.w_gate", 1)):
            for mine, theirs in ((placed.theta, given.theta), (placed.moments, given.moments)):
                paths = [p for p in theirs if p.startswith(f"{layer}.{name}")]
                assert paths
                for each in paths:
                    expected = theirs[each].take(order, axis)
                    np.testing.assert_array_equal(mine[each], expected)
    mine, theirs = scores_of(output), scores_of(trained_logdir)
    assert mine.cross_entropy == pytest.approx(theirs.cross_entropy, rel=1e-5)
    assert mine.tokens == theirs.tokens


def test_a_plan_that_cannot_be_applied_is_refused(trained_logdir, tmp_path, capsys):
    names = f"--logdir={trained_logdir}", f"--output={tmp_path}/placed"
    code, _, err = run_here(capsys, *names)
    assert code == 1 and "--plan is missing: the file that gshard-plan --loads --json wrote" in err
    even = tmp_path / "even.json"
    even.write_text(json.dumps(example_plan.example_plan()))
    code, _, err = run_here(capsys, *names, f"--plan={even}")
    assert code == 1 and f"--plan={even} has no placement of experts; plan with" in err
    copied, _ = plan_file(tmp_path / "copied.json", replicas=4)
    code, _, err = run_here(capsys, *names, f"--plan={copied}")
    assert code == 1
    assert f"{PATHS[0]}: the placement has 12 places for the run's 8 experts" in err
    other, _ = plan_file(tmp_path / "other.json", paths=["encoder.layers[1].feed_forward"])
    code, _, err = run_here(capsys, *names, f"--plan={other}")
    assert code == 1 and "encoder.layers[1].feed_forward is no layer with experts" in err
    assert f"Did you mean '{PATHS[0]}'?" in err
    assert not (tmp_path / "placed").exists()


@pytest.mark.parametrize(
    ("router", "words"),
    [
        (HashRouter.params(), "HashRouter does not learn which experts suit a token"),
        (
            GroupLimitedRouter.params().set(expert_groups=4, groups_per_token=2),
            "expert_groups=4 limits tokens to groups",
        ),
    ],
)
def test_routers_that_need_the_order_are_refused(router, words):
    trainer = tiny_translation.trainer(stack_values={"moe.router": router})
    layers = watched_layers(trainer.task)
    (path, *_) = layers
    with pytest.raises(ValueError, match=words):
        expert_placement.order_of(path, [[1, 0, 2, 3], [4, 5, 6, 7]], layers)
    trainer = tiny_translation.trainer()
    layers = watched_layers(trainer.task)
    with pytest.raises(ValueError, match="8 experts over 3 devices; expected the same number"):
        expert_placement.order_of(path, [[1, 0, 2], [4, 5, 3], [6, 7]], layers)
