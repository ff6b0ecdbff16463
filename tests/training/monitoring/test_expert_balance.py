"""Tests a run's report on its experts: a digest, and a warning if some get no tokens."""

import pytest

from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.training.monitoring.expert_balance import HELP, ExpertBalance
from tests import tiny
from tests.training.test_loop import Run

LAYERS = ("encoder.layers[1].feed_forward", "decoder.layers[1].feed_forward")


def row(*dead, dropped=0.0):
    """Returns the metrics of a step, given the number of dead experts of each layer."""
    found = {"loss": 1.0}
    for layer, count in zip(LAYERS, dead, strict=True):
        found[f"{layer}/load_max_over_mean"] = 1.0 + count
        found[f"{layer}/dropped_share"] = dropped
        found[f"{layer}/utilization"] = 0.5
        found[f"{layer}/dead_experts"] = float(count)
    return found


def warnings_of(*intervals):
    """Returns the warnings after each interval, given the dead experts of each step."""
    balance, step, said = ExpertBalance(), 0, []
    for interval in intervals:
        for dead in interval:
            step += 1
            balance.add(step, row(*dead))
        said.append(balance.end_interval())
    return said


def test_experts_dead_for_an_interval_are_reported_with_advice():
    (said,) = warnings_of([(2, 0), (1, 0), (3, 1)])
    assert said == [
        f"Warning: {LAYERS[0]}: 1 expert or more has had no token in any step since step 1",
        HELP,
    ]
    for words in ("auxiliary_loss_weight", "z_loss_weight", "bias"):
        assert words in HELP


def test_one_step_without_dead_experts_prevents_the_warning():
    assert warnings_of([(2, 1), (0, 0), (2, 1)]) == [[]]


def test_warning_names_the_first_step_with_dead_experts():
    said = warnings_of([(1, 0), (0, 0), (3, 0), (4, 0)], [(5, 1), (4, 1)], [(2, 0)], [(0, 0)], [])
    assert said[0] == []
    shown = f"{LAYERS[0]}: 3 experts or more have had no token in any step since step 3"
    assert said[1] == [
        f"Warning: {shown}",
        f"Warning: {LAYERS[1]}: 1 expert or more has had no token in any step since step 5",
        HELP,
    ]
    # The warning gives the minimum; advice is printed once.
    shown = f"{LAYERS[0]}: 2 experts or more have had no token in any step since step 3"
    assert said[2] == [f"Warning: {shown}"]
    assert said[3] == said[4] == []


def test_recovered_layer_starts_a_new_warning():
    said = warnings_of([(1, 0)], [(0, 0)], [(1, 0)])
    assert "since step 1" in said[0][0] and "since step 3" in said[2][0]


def test_digest_shows_the_worst_layer():
    balance = ExpertBalance()
    assert balance.digest(row(0, 0, dropped=0.25)) == "fullest expert 1.00x  dropped 25.0%"
    assert balance.digest(row(2, 1)) == "fullest expert 3.00x  dropped 0.0%  dead experts 3"


def test_summary_covers_the_last_interval():
    balance = ExpertBalance()
    assert balance.summary() == []
    for step, dead in enumerate([(4, 4), (1, 0), (3, 0)], 1):
        balance.add(step, row(*dead))
        if step == 1:
            balance.end_interval()
    balance.end_interval()
    head, first, second = balance.summary()
    assert "last 2 steps" in head
    assert first == f"  {LAYERS[0]}  fullest 3.00x  slots used 50.0%  dropped 0.0%  dead 2.0"
    assert second.endswith("dead 0.0") and LAYERS[1] in second


@pytest.mark.parametrize("metrics", [{"loss": 1.0}, {"loss": 1.0, "encoder/dead": 3.0}])
def test_run_without_experts_reports_nothing(metrics):
    balance = ExpertBalance()
    balance.add(1, metrics)
    assert balance.digest(metrics) == ""
    assert balance.end_interval() == [] and balance.summary() == []


class Routed(tiny.TinyTask):
    """The tiny task with the metrics of a layer in which two experts never get a token."""

    @layer_method
    def loss(self, theta, batch):
        for name, value in row(2, 0).items():
            layer, _, metric = name.partition("/")
            if layer == LAYERS[0]:
                self.hidden.add_metric(metric, value)
        return super().loss(theta, batch)


def test_run_warns_at_log_steps_and_ends_with_a_summary(tmp_path):
    run = Run(tmp_path, steps=12)
    run.params.task = Routed.params()
    run.go()
    lines = [line for line in run.screen.getvalue().splitlines() if "compil" not in line]
    warning = "Warning: hidden: 2 experts or more have had no token in any step since step 1"
    assert [index for index, line in enumerate(lines) if line == warning] == [1, 4, 6]
    assert lines[2] == HELP and lines.count(HELP) == 1
    for index, step in ((0, 5), (3, 10), (5, 12)):
        assert lines[index].startswith(f"step {step}/12")
        assert "fullest expert 3.00x  dropped 0.0%  dead experts 2" in lines[index]
    assert lines[-2:] == [
        "Load of the experts in the last 2 steps (1.00x is an even load):",
        "  hidden  fullest 3.00x  slots used 50.0%  dropped 0.0%  dead 2.0",
    ]
