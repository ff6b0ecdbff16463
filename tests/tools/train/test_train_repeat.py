# tests: wings/repeat/loop.py, tools/train.py
"""Checks that gshard-train with rematerialized loops equals separate layers."""

import json

import pytest

from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.tools import train
from tests.tools import tiny_translation

STEPS = 2
LOOP = {
    "execution": "@lingvo_gshard.wings.repeat.loop.Repeat",
    "execution.rematerialize": "'full'",
}


def metrics_of_run(directory, **execution):
    """Returns the lines of metrics.jsonl of a short run with two layers on each side."""
    directory.mkdir()
    stacks = {f"task__{stack}__num_layers": 2 for stack in ("encoder", "decoder")}
    flags = tiny_translation.write(directory, **stacks)
    for stack in ("encoder", "decoder"):
        flags += [f"--gin_param=task.{stack}.{name} = {value}" for name, value in execution.items()]
    train.main(["gshard-train", *flags, f"--logdir={directory}/run", f"--steps={STEPS}"])
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_loop_trains_like_separate_layers_and_reports_their_names(tmp_path):
    layers = metrics_of_run(tmp_path / "layers")
    loop = metrics_of_run(tmp_path / "loop", **LOOP)
    assert [row["step"] for row in loop] == [row["step"] for row in layers] == [1, 2]
    for one, other in zip(loop, layers, strict=True):
        assert set(one) == set(other)
        assert any(name.startswith("encoder.layers[1].feed_forward/") for name in one)
        for name in ("loss", "cross_entropy", "gradient_norm", "learning_rate"):
            assert_close(one[name], other[name], "order")
