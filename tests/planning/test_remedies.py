# tests: wings/planning/remedies.py, wings/planning/experiments.py
"""Checks the plans that are offered for a step that does not fit: rated, compiled, repeatable."""

import dataclasses
import shlex
import types

import pytest

from lingvo_gshard.core.config import registry
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools import plan
from lingvo_gshard.tools.console import spelling
from lingvo_gshard.wings.gin.binding import apply_gin
from lingvo_gshard.wings.planning import remedies
from lingvo_gshard.wings.planning.compiling.compilation import TooLargeError
from lingvo_gshard.wings.planning.experiments import PlanOptions, plan_experiment
from lingvo_gshard.wings.planning.machines import topologies
from tests.planning import example_plan
from tests.told import Told

GIB = 2**30
DENSE = ["task.decoder.moe_every = 0", "input.batch_rows = 64"]


def quickstart(*settings, experiment="language_model.quickstart"):
    return apply_gin(registry.get(experiment), [], settings)


def machine(usable_bytes, name="cpu:8"):
    topology = topologies.get(name)
    chip = dataclasses.replace(topology.chip, usable_bytes=usable_bytes)
    return dataclasses.replace(topology, chip=chip)


@dataclasses.dataclass
class Planned:
    """Stands in for plan_experiment: answers with peaks, and keeps what it was asked."""

    peaks: list
    asked: list = dataclasses.field(default_factory=list)

    def __call__(self, params, topology, options, progress):
        self.asked.append((params.copy(), topology, options))
        peak = self.peaks[len(self.asked) - 1]
        if isinstance(peak, Exception):
            raise peak
        found = example_plan.as_plan(example_plan.example_plan())
        memory = types.SimpleNamespace(peak=peak)
        is_small = peak <= topology.chip.usable_bytes
        fields = {name: getattr(found, name) for name in found.__struct_fields__}
        return type(found)(
            **fields
            | {
                "fits": is_small,
                "bytes_per_device": memory,
                "remedies": [],
                "topology": topology.name,
            }
        )


def answer(monkeypatch, params, topology, peaks, limit=3, **options):
    planned, told = Planned(peaks), Told()
    monkeypatch.setattr(remedies, "plan_experiment", planned)
    before = params.to_text()
    found = remedies.plan_to_fit(params, topology, PlanOptions(**options), limit, told)
    assert params.to_text() == before
    said = [text for text in told.said if text.startswith("it does not fit; trying `")]
    assert len(said) == len(found.tried) == len(planned.asked) - 1
    return found, planned.asked


def too_large(needed):
    error = TooLargeError("far more")
    error.needed = needed
    return error


def test_a_plan_that_fits_needs_no_remedy(monkeypatch):
    found, asked = answer(monkeypatch, quickstart(), machine(GIB), [GIB])
    assert len(found.plans) == len(asked) == 1 and found.plan.fits and not found.problem


def test_a_step_without_a_plan_is_answered_with_one_that_fits(monkeypatch):
    params = quickstart(*DENSE)
    peaks = [too_large(8 * GIB), GIB // 2, GIB // 2]
    found, asked = answer(monkeypatch, params, machine(GIB), peaks, strategy="fsdp")
    assert found.problem == "far more" and found.plan.fits
    assert found.plan.change == found.tried[0].change and found.plan.remedies == list(found.tried)
    assert len(found.plans) == 2 and all(plan.fits for plan in found.plans)
    # The second differs in kind.
    changes = [p.task.decoder.execution.rematerialize for p, _, _ in asked[1:]]
    assert len(set(changes)) == 2


def test_estimates_learn_from_compiled_peaks(monkeypatch):
    """After a change that needs more than estimated, a smaller one is compiled next."""
    params, topology = quickstart(*DENSE), machine(GIB)
    peaks = [too_large(4 * GIB), int(1.3 * GIB), GIB // 2, GIB // 2]
    found, asked = answer(monkeypatch, params, topology, peaks, 4, strategy="fsdp")
    assert [row.fits for row in found.tried[:2]] == [False, True]
    first, second = (p for p, _, _ in asked[1:3])
    assert saved(second) < saved(first)


def saved(params):
    """Returns a number that grows with the rows whose tensors are kept at once."""
    share = 1.0 if params.task.decoder.execution.rematerialize == "none" else 0.1
    return share * params.input.batch_rows / params.step.micro_batches


def test_nothing_that_fits_is_an_error_that_says_what_was_tried(monkeypatch):
    params = quickstart(*DENSE)
    with pytest.raises(TooLargeError, match=r"far more Tried, without a plan that fits:\n  `"):
        answer(monkeypatch, params, machine(GIB), [too_large(4 * GIB)] * 9, 2, strategy="fsdp")
    with pytest.raises(TooLargeError, match="far more$"):
        answer(monkeypatch, params, machine(GIB), [too_large(4 * GIB)], 0)


def test_a_change_that_cannot_be_planned_has_its_reason(monkeypatch):
    peaks = [2 * GIB, UserError("no such thing"), GIB // 2, GIB // 2]
    found, _ = answer(monkeypatch, quickstart(*DENSE), machine(GIB), peaks, strategy="fsdp")
    assert not found.plans[0].fits and found.plans[1].fits
    assert (found.tried[0].reason, found.tried[0].peak) == ("no such thing", None)
    assert not found.plan.fits and found.plan.remedies == list(found.tried)


def test_the_unchanged_step_is_planned_on_more_devices(monkeypatch):
    topology = machine(GIB, "v5e:2x4")
    monkeypatch.setattr(type(topology), "compiler", "tpu")
    peaks = [2 * GIB, GIB // 2, GIB // 2]
    params = quickstart(*DENSE)
    found, asked = answer(monkeypatch, params, topology, peaks, strategy="fsdp")
    unchanged, larger, options = asked[2]
    assert larger.chip.key == "v5e" and larger.devices in (16, 32, 64)
    assert options.mesh == f"data={larger.devices}"
    assert unchanged.to_text() == params.to_text()
    assert found.plans[2].change == f"`topology={larger.name}` `mesh=data={larger.devices}`"
    assert found.tried[1].price > 0


@pytest.mark.parametrize("strategy", ["expert", "expert_fsdp", "E->data; H->data"])
def test_whole_weights_are_split_unless_the_strategy_does_it(monkeypatch, strategy):
    topology = machine(GIB)
    rest = remedies._Remedies(quickstart(), topology, PlanOptions(strategy=strategy), 3, Told())
    strategies = {change.strategy for group in rest._changes() for change in group}
    assert strategies == ({"expert", "expert_fsdp"} if strategy == "expert" else {strategy})


def test_further_changes_are_the_smaller_ones_first():
    topology = machine(GIB)
    rest = remedies._Remedies(quickstart(*DENSE), topology, PlanOptions(), 3, Told())
    further = [group[0].settings for group in rest._changes()][1:]
    assert all(set(one) <= set(two) for one, two in zip(further, further[1:], strict=False))
    batches = [settings.get("input.batch_rows", 64) for settings in further]
    assert batches == sorted(batches, reverse=True) and batches[-1] == 8


def test_changes_are_flags_that_reproduce_the_step(monkeypatch):
    peaks = [2 * GIB, 2 * GIB, 2 * GIB, 2 * GIB, 2 * GIB, GIB // 2]
    params = quickstart(*DENSE)
    found, asked = answer(monkeypatch, params, machine(GIB // 50), peaks, 5)
    values = plan.define_flags()
    spelling.spell_flags_of(values)
    for row, (changed, _, options) in zip(found.tried, asked[1:], strict=True):
        values = plan.define_flags()
        values([plan.NAME, *shlex.split(spelling.with_flags(row.change))])
        again = apply_gin(params, [], values.gin_param)
        assert again.to_text() == changed.to_text()
        assert (values.strategy or "expert") == options.strategy
    spelling.spell_flags_of([])


@pytest.mark.slow
def test_a_change_is_compiled_and_planning_with_it_gives_the_same_peak():
    params = quickstart("input.batch_rows = 64")
    asked = plan_experiment(params, topologies.get("cpu:8"))
    small = machine(int(0.7 * asked.bytes_per_device.peak))
    found = remedies.plan_to_fit(params, small, PlanOptions())
    assert not found.plans[0].fits and found.plans[1].fits
    row = next(row for row in found.tried if row.fits)
    settings = [part for part in row.change.split("`") if " = " in part]
    strategies = [
        part.removeprefix("strategy=") for part in row.change.split("`") if "strategy=" in part
    ]
    again = plan_experiment(
        apply_gin(params, [], settings),
        topologies.get("cpu:8"),
        PlanOptions(strategy=next(iter(strategies), None)),
    )
    assert again.bytes_per_device.peak == row.peak == found.plans[1].bytes_per_device.peak
