"""Tests a run's report on the load of its experts: a digest of each step, and a summary."""

import pytest

from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.wings.services.expert_balance import ExpertBalance
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


def test_digest_shows_the_worst_layer():
    balance = ExpertBalance()
    assert balance.digest(row(0, 0, dropped=0.25)) == "fullest expert 1.00x  dropped 25.0%"
    assert balance.digest(row(2, 1)) == "fullest expert 3.00x  dropped 0.0%  dead experts 3"


def test_summary_covers_the_last_interval():
    balance = ExpertBalance()
    assert balance.summary() == []
    for dead in [(4, 4), (1, 0), (3, 0)]:
        balance.add(row(*dead))
        if dead == (4, 4):
            balance.end_interval()
    balance.end_interval()
    head, first, second = balance.summary()
    assert "last 2 steps" in head
    assert first == f"  {LAYERS[0]}  fullest 3.00x  slots used 50.0%  dropped 0.0%  dead 2.0"
    assert second.endswith("dead 0.0") and LAYERS[1] in second


@pytest.mark.parametrize("metrics", [{"loss": 1.0}, {"loss": 1.0, "encoder/dead": 3.0}])
def test_run_without_experts_reports_nothing(metrics):
    balance = ExpertBalance()
    balance.add(metrics)
    assert balance.digest(metrics) == ""
    balance.end_interval()
    assert balance.summary() == []


class Routed(tiny.TinyTask):
    """The tiny task with the metrics of a layer in which two experts never get a token."""

    @layer_method
    def loss(self, theta, batch):
        for name, value in row(2, 0).items():
            layer, _, metric = name.partition("/")
            if layer == LAYERS[0]:
                self.hidden.add_metric(metric, value)
        return super().loss(theta, batch)


def test_log_lines_have_a_digest_and_a_run_ends_with_a_summary(tmp_path):
    run = Run(tmp_path, steps=12)
    run.params.task = Routed.params()
    run.go()
    lines = [line for line in run.screen.getvalue().splitlines() if "compil" not in line]
    logged = [line for line in lines if line.startswith("step ") and "dev" not in line]
    assert [line.split()[1] for line in logged] == ["5/12", "10/12", "12/12"]
    for line in logged:
        assert "fullest expert 3.00x  dropped 0.0%  dead experts 2" in line
    assert lines[-2:] == [
        "Load of the experts in the last 2 steps (1.00x is an even load):",
        "  hidden  fullest 3.00x  slots used 50.0%  dropped 0.0%  dead 2.0",
    ]
