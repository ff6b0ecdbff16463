"""Checks when a loss counts as diverged, and what is advised then."""

import json
import math

import numpy as np
import pytest

from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.optimizers.momentum import Momentum
from lingvo_gshard.wings.services import metrics_rows
from lingvo_gshard.wings.services.divergence import Divergence, advice, of_run

GUESSING = math.log(1000)


def rows(losses, **more):
    return [
        (step, {"loss": loss, "cross_entropy": loss, "learning_rate": 1e-3, **more})
        for step, loss in enumerate(losses, 1)
    ]


def lines(losses, guessing_loss=GUESSING, watch=None):
    """Returns (step, line) of what is said, and the step since which the loss has diverged."""
    watch = watch or Divergence(Trainer.params(), guessing_loss)
    said = [(step, watch.add(step, row)) for step, row in rows(losses)]
    return [(step, line) for step, line in said if line], watch


def healthy(kind):
    """Returns the losses of runs that have not diverged."""
    steps = np.arange(200)
    noise = np.random.default_rng(0).normal(size=200)
    falling = 2 + 5 * np.exp(-steps / 40) + 0.3 * noise
    return {
        "falls": falling,
        "spikes": np.where(steps % 50 == 49, 1e6, falling),
        "high start": 40 * np.exp(-steps / 20) + 3,
        "warm start": np.where(steps < 60, 2 + steps / 30, 4),
        "plateau": GUESSING + 0.1 * noise,
        "negative": -falling,
        "tiny": 1e-3 * falling,
        "skipped": np.where(steps % 10 == 9, np.inf, falling),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["falls", "spikes", "high start", "warm start", "plateau", "negative", "tiny", "skipped"],
)
def test_healthy_losses_are_not_reported(kind):
    said, watch = lines(healthy(kind), None if kind in ("negative", "tiny") else GUESSING)
    assert said == [] and watch.since is None and watch.summary() == []


@pytest.mark.parametrize("guessing_loss", [None, GUESSING])
def test_an_explosion_is_said_once_and_in_the_summary(guessing_loss):
    said, watch = lines([7.0, 6.5, *[1e13] * 60], guessing_loss)
    ((step, line),) = said
    # Two ordinary losses and three large ones have a large median.
    assert step == watch.since == 5
    assert line.startswith("Warning: step 5: the loss has diverged: 1e+13 in step 5, 7 in step 1")
    assert ("6.908 by guessing" in line) == (guessing_loss is not None)
    (summary,) = watch.summary()
    assert summary.startswith("Warning: the loss has diverged since step 5: 1e+13 in step 62")
    assert summary.endswith("The lowest loss was 6.5 in step 2.")


def test_a_model_that_stays_worse_than_guessing_has_diverged():
    said, watch = lines([7.0, 5.0, 4.0] + [9.0] * 30)
    assert [step for step, _ in said] == [watch.since] == [20]
    # Without the loss of guessing there is no such measure.
    assert lines([7.0, 5.0, 4.0] + [9.0] * 30, None)[0] == []


def test_recovery_is_said_and_a_second_divergence_as_well():
    said, watch = lines([7.0] * 5 + [100.0] * 10 + [5.0] * 40 + [1e9] * 10)
    assert [line.startswith("Warning") for _, line in said] == [True, False, True]
    assert "which diverged at step 8, has recovered" in said[1][1]
    assert watch.since == said[2][0] == 58


def test_a_resumed_run_remembers_the_first_loss_and_that_it_diverged():
    before = rows([3.0] * 2 + [100.0] * 30)
    watch = Divergence(Trainer.params())
    watch.resume([before[0], *before[-20:]])
    # The first loss and two more are ordinary only at first.
    assert watch.since == before[-20][0] + 3
    assert watch.add(33, before[-1][1]) == ""


@pytest.mark.parametrize(
    "values, rate, expected, missing",
    [
        ({}, 1e6, ["The likely cause is the learning rate: 1e+06", "clip_norm = 1.0"], ["precis"]),
        ({"clip_norm": 1.0}, 1e-3, ["Likely to help: a lower step.schedule"], ["clip_norm"]),
        ({"precision": "float16"}, 1e-3, ["step.precision = 'float32' (it is float16)"], []),
        ({"optimizer": Momentum.params()}, 1.0, ["Likely to help"], ["likely cause"]),
    ],
)
def test_advice_names_what_is_unusual(values, rate, expected, missing):
    text = advice(Trainer.params().set(**values), {"learning_rate": rate})
    assert all(words in text for words in expected), text
    assert not any(words in text for words in missing), text


def test_advice_counts_dead_experts_and_missing_warm_up():
    row = {"learning_rate": 1e-3, "a.moe/dead_experts": 3.0, "b.moe/dead_experts": 1.0}
    text = advice(Trainer.params(), row)
    assert "step.schedule.warmup_steps (0: there is no warm-up)" in text
    assert text.endswith("Experts without tokens: 4.")


def test_a_finished_run_tells_since_when_it_has_diverged(tmp_path, monkeypatch):
    """Also if the rows at the end of the file, which are read first, begin later."""
    monkeypatch.setattr(metrics_rows, "_TAIL", 2000)
    path = tmp_path / "metrics.jsonl"
    losses = [7.0, 6.5, *[1e13] * 200]
    path.write_text("".join(json.dumps({"step": s, **row}) + "\n" for s, row in rows(losses)))
    found = of_run(path, Trainer.params(), len(losses), GUESSING)
    assert found.since == 5 and "has diverged since step 5: 1e+13 in step 202" in found.summary()[0]
    assert of_run(path, Trainer.params(), 4, GUESSING).since is None
    assert of_run(tmp_path / "none", Trainer.params(), 4, GUESSING).summary() == []
