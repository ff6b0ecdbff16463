# tests: /studies/widths/
"""Runs python -m studies widths on a tiny model, and compares its losses with a plain training."""

import itertools
import json

import numpy as np
import pytest

from lingvo_gshard.api.experiments import experiment
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.training.experiments import make_trainer
from lingvo_gshard.training.step.schedules import Linear
from studies.widths.command import table
from tests.studies.running import run_study

SMALL = (
    "input.batch_rows = 4",
    "input.length = 24",
    "input.vocabulary.size = 300",
    "task.model_dim = 16",
    "task.decoder.hidden_dim = 16",
    "task.decoder.num_heads = 2",
    "task.decoder.num_layers = 1",
    "task.decoder.moe_every = 0",
)
STEPS = 5


def loss_of_a_plain_training(rate: float) -> float:
    settings = (*SMALL, "step.optimizer = @lingvo_gshard.training.step.adam.Adam")
    params = experiment("language_model.quickstart", settings, ())
    params.step.schedule = Linear.params().set(learning_rate=rate, warmup_steps=20)
    input_ = params.input.instantiate()
    task = params.task.cls.with_vocabulary_sizes(params.task, input_.vocabulary_sizes())
    runtime = SingleDeviceRuntime(make_trainer(params, task))
    runtime.init_state()
    batches = itertools.islice(input_.train_batches(1), STEPS)
    return [runtime.train_step(batch).read()["loss"] for batch in batches][-1]


def test_losses_are_those_of_a_training_and_runs_are_kept(capsys, tmp_path):
    settings = [f"--gin_param={text}" for text in SMALL]
    flags = [f"--folder={tmp_path}", f"--steps={STEPS}", "--widths=16,32", *settings]
    code, _, err = run_study(capsys, "widths", *flags, "--rates=0.01")
    assert not code, err
    found = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert [(each["way"], each["width"]) for each in found] == [
        ("standard", 16),
        ("standard", 32),
        ("width scaling", 32),
    ]
    np.testing.assert_allclose(found[0]["loss"], loss_of_a_plain_training(0.01), rtol=1e-4)
    assert found[1]["loss"] != found[2]["loss"]
    code, out, err = run_study(capsys, "widths", *flags, "--rates=0.01,0.1", "--notrain")
    assert not code, err
    assert f"{found[2]['loss']:.3f}" in out
    assert len((tmp_path / "losses.jsonl").read_text().splitlines()) == 3


def test_a_table_averages_over_seeds():
    rows = [
        {"seed": seed, "way": "standard", "width": 8, "rate": 0.1, "loss": loss}
        for seed, loss in ((1, 2.0), (2, 3.0))
    ]
    found = table(rows, [0.1, 0.2])
    assert found.columns[2:] == ["0.1", "0.2"]
    assert list(found.rows[0]) == ["standard", "8", "2.500", "-"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rates=fast"], "--rates=fast: numbers above 0 were expected"),
        (["--widths=0"], "--widths=0: numbers above 0 were expected"),
        (["--widths=20"], "--widths=20: 4 heads for M = 128 do not shrink so"),
    ],
)
def test_errors_name_the_flag(capsys, tmp_path, flags, message):
    code, _, err = run_study(capsys, "widths", f"--folder={tmp_path}", *flags)
    assert code and message in err
