"""Runs gshard-plan --loads: the report, mistakes, and a run from its training to its plan."""

import dataclasses
import json
import re

import msgspec
import numpy as np
import pytest

import lingvo_gshard
from lingvo_gshard.tools import experts, plan, train
from lingvo_gshard.tools.console import Console, startup
from lingvo_gshard.tools.plan_reports.loads_report import print_loads
from lingvo_gshard.wings.planning.loads.file import Loads
from lingvo_gshard.wings.planning.loads.rating import rate
from tests.planning.loads import example_loads
from tests.planning.loads.example_loads import choose, dropless, layer_of, record_of
from tests.tools import tiny_translation

ENCODER, DECODER = (f"{side}.layers[0].feed_forward" for side in ("encoder", "decoder"))
STEPS = 6


def printed(layers, steps=5, replicas=0):
    """Returns the report of layers under the example's loads, and these."""
    records = {
        layer.path: [record_of(choose(i), 10 * i, 6, layer.path) for i in range(1, steps + 1)]
        for layer in layers
    }
    whole = example_loads.plan()
    found = rate(whole, layers, Loads("load.json", records), replicas)
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    print_loads(found, whole.seconds_per_step, console)
    return console.export_text(), found


def test_report_of_buffers_and_of_a_dropless_dispatch():
    text, found = printed([layer_of(path=ENCODER), dropless(path=DECODER)])
    slowest = max(layer.slowest.p50 for layer in found.layers)
    assert f"Loads of load.json (5 steps, 10 to 50): the slowest device has {slowest:.2f}x" in text
    buffers, free = found.layers
    row = re.search(rf"{re.escape(ENCODER)} +4 .*\n  Top2Router, GatherDispatch", text)
    assert row and f"{buffers.slowest.p90:.2f}" in row[0]
    assert f"{buffers.dropped_share.p50:.1%}" in row[0]
    assert f"{buffers.busiest_expert} ({buffers.busiest_over_mean:.2f}x)" in row[0]
    assert re.search(rf"capacity_factor +1\.00 +{buffers.sufficient_factor.p50:.2f}", text)
    assert re.search(rf"bound +none +{free.sufficient_bound.p50:.2f}", text)
    assert "time with buffers that drop nothing" in text
    for device, held in enumerate(free.placement):
        assert f"{device}: {', '.join(map(str, held))}" in text
    assert f"found from the earlier half of the steps, it has {free.later_placed:.2f}x" in " ".join(
        text.split()
    )
    assert max(map(len, text.splitlines()[2:])) <= 100


def test_report_of_one_step_of_many_layers_is_short():
    layers = [dropless(path=f"decoder.layers[{i}].feed_forward") for i in range(20)]
    text, found = printed(layers, steps=1, replicas=4)
    # Another expert of 1,000 bytes in each layer.
    assert found.replica_bytes == 20_000 and "Copies take 19.5 KiB of weights" in text
    assert "(step 10)" in text and "earlier half" not in text
    assert text.count("and 8 more; --json has them all") == 3


MISTAKES = {
    "--replicas=4": "--replicas=4 applies to --loads, which is not given",
    "--loads_from=5": "--loads_from=5 applies to --loads, which is not given",
    "--loads=l.json --search": "--search does not go with --loads=l.json, which is for a training "
    "step of an experiment",
    "--loads=l.json --budget=1e6": "--budget=1000000.0 does not go with --loads=l.json",
    "step.bin --loads=l.json": "--loads=l.json does not apply to the program step.bin",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_flags_that_do_not_fit_are_refused(flags, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.bin").write_bytes(b"")
    call = startup.guarded(plan.NAME, plan.main)
    assert call([plan.NAME, *flags.split(), "--topology=cpu:4"]) == 1
    assert MISTAKES[flags] in capsys.readouterr().err


@pytest.mark.slow
def test_from_training_to_the_plan_of_its_loads(tmp_path, capsys):
    """The plan's dropped share of a step is what training dropped in it."""
    arguments = tiny_translation.write(tmp_path)
    watched = "--gin_param=run.routers.every_steps = 1"
    logdir, load, file = (tmp_path / name for name in ("run", "load.json", "plan.json"))
    train.main(["gshard-train", *arguments, watched, f"--logdir={logdir}", f"--steps={STEPS}"])
    experts.main(["gshard-experts", "report", f"--logdir={logdir}", f"--json={load}"])
    flags = [*arguments, "--topology=cpu:4", f"--loads={load}"]
    assert plan.main([plan.NAME, *flags, f"--json={file}"]) == 0
    out = capsys.readouterr().out
    record = json.loads(file.read_text())
    metrics = [json.loads(line) for line in (logdir / "metrics.jsonl").read_text().splitlines()]
    assert record["loads"]["steps"] == STEPS
    for layer in record["loads"]["layers"]:
        path = layer["layer"]
        assert path in out
        trained = [
            row[f"{path}/dropped_share"] for row in metrics if f"{path}/dropped_share" in row
        ]
        assert layer["dropped_share"]["mean"] == pytest.approx(np.mean(trained), abs=1e-6)
        assert layer["dropped_share"]["worst"] == pytest.approx(np.max(trained), abs=1e-6)
        records = [r for r in json.loads(load.read_text())["watched"] if r["layer"] == path]
        ratios = []
        for one in records:
            on_device = [sum(one["choices"][2 * d : 2 * d + 2]) for d in range(4)]
            ratios.append(max(on_device) / np.mean(on_device))
        assert layer["slowest"]["worst"] == pytest.approx(max(ratios))
        assert layer["slowest"]["mean"] == pytest.approx(np.mean(ratios))
    experiment = lingvo_gshard.experiment("translation.from_files", gin_files=[arguments[1][11:]])
    mine = lingvo_gshard.plan(experiment, "cpu:4", loads=load, loads_from=3)
    assert mine.loads and mine.loads.steps == STEPS - 2
    with pytest.raises(ValueError, match=r"^`loads_from=9`: the last step in `loads=.*` is 6;"):
        lingvo_gshard.plan(experiment, "cpu:4", loads=load, loads_from=9)
    assert dataclasses.asdict(mine.loads.layers[0])["layer"] == ENCODER
    assert msgspec.json.decode(mine.to_json())["loads"]["last_step"] == STEPS
