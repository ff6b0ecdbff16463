# tests: wings/planning/experiments.py
"""Checks which changes are suggested for a step that does not fit, and in which order."""

import shlex
import types
from unittest import mock

import pytest

from lingvo_gshard.core.config import registry
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools import plan
from lingvo_gshard.tools.console import spelling
from lingvo_gshard.wings.gin.binding import apply_gin
from lingvo_gshard.wings.planning import experiments
from lingvo_gshard.wings.planning.experiments import PlanOptions
from lingvo_gshard.wings.planning.machines import topologies
from tests.told import Told

EXPERIMENT = "translation.quickstart"


def tried(params, fitting=None, most=20, strategy=None, topology="cpu:8"):
    """Returns the rows, the planned (strategy, Params) pairs and the progress messages.

    fitting: index of the plan that fits.
    """
    options = PlanOptions(strategy=strategy)
    seen, told = [], Told()

    def plan_experiment(params, topology, options, progress):
        del topology, progress
        seen.append((options.strategy, params.copy()))
        if len(seen) == 2 and fitting != 2:
            raise UserError("`topology`: far too large")
        return types.SimpleNamespace(
            fits=len(seen) == fitting,
            bytes_per_device=types.SimpleNamespace(peak=100 - len(seen)),
            seconds_per_step=float(len(seen)),
        )

    machine = topologies.get(topology)
    with mock.patch.object(experiments, "plan_experiment", plan_experiment):
        rows = experiments.suggest(params, machine, options, most, told)
    assert len(rows) == len(seen) == len(told.said)
    return rows, seen, told.said


def quickstart(*settings):
    return apply_gin(registry.get(EXPERIMENT), [], settings)


def test_suggested_changes_accumulate():
    params = quickstart("input.batch_rows = 33")
    before = params.to_text()
    rows, seen, said = tried(params)
    assert params.to_text() == before
    assert all(text.startswith("it does not fit; trying `") for text in said)
    assert [row.fits for row in rows] == [False] * len(rows)
    first = rows[0].change.split("` `")
    assert first == [
        '`task.encoder.execution.rematerialize = "full"',
        'task.decoder.execution.rematerialize = "full"`',
    ]
    assert seen[0][1].task.encoder.execution.rematerialize == "full" and seen[0][0] is None
    assert rows[1].change == rows[0].change + " `strategy=expert_fsdp`"
    assert rows[1].reason == "`topology`: far too large" and rows[1].peak is None
    assert rows[0].peak == 99 and rows[0].seconds_per_step == 1.0
    batches = [p.input.batch_rows for _, p in seen]
    assert sorted(set(batches), reverse=True) == [33, 16, 8]
    assert seen[-1][1].task.encoder.moe.router.capacity_factor == 0.5


def test_suggested_flags_reproduce_the_params():
    rows, seen, _ = tried(quickstart())
    values = plan.define_flags()
    spelling.spell_flags_of(values)
    values([plan.NAME, *shlex.split(spelling.with_flags(rows[-1].change))])
    spelling.spell_flags_of([])
    again = apply_gin(quickstart(), [], values.gin_param)
    assert again.to_text() == seen[-1][1].to_text()
    assert values.strategy == seen[-1][0] == "expert_fsdp"


@pytest.mark.parametrize(("most", "fitting", "count"), [(3, 2, 2), (1, 9, 1), (0, 1, 0)])
def test_suggestions_stop_when_one_fits_or_the_limit_is_reached(most, fitting, count):
    rows, _, _ = tried(quickstart(), fitting, most)
    assert len(rows) == count
    assert any(row.fits for row in rows) == (fitting <= most)


@pytest.mark.parametrize("strategy", ["expert_fsdp", "E->data; H->model"])
def test_strategies_that_already_shard_weights_are_kept(strategy):
    rows, _, _ = tried(quickstart(), strategy=strategy)
    assert not any("strategy" in row.change for row in rows)


def test_changes_already_in_effect_are_not_suggested():
    settings = [
        "task.encoder.execution.rematerialize = 'full'",
        "task.decoder.execution.rematerialize = 'full'",
        "task.encoder.moe.router.capacity_factor = 0.5",
        "task.decoder.moe_every = 0",
        "input.batch_rows = 8",
        "step.precision = 'bfloat16'",
    ]
    rows, _, _ = tried(quickstart(*settings), strategy="fsdp")
    assert rows == []


def test_language_model_has_one_stack_to_change():
    rows, _, _ = tried(registry.get("language_model.quickstart"), most=1)
    assert rows[0].change == '`task.decoder.execution.rematerialize = "full"`'
