"""Plans of experiments whose rows the mesh splits evenly, and of others."""

import pytest

from lingvo_gshard.wings.planning.experiments import PlanOptions, plan_experiment
from lingvo_gshard.wings.planning.machines import topologies
from tests.tiny import experiment_params


@pytest.mark.parametrize(
    ("rows", "micro_batches", "mesh", "words"),
    [
        (8, 1, "data=8", None),
        (8, 2, "data=4,model=2", None),
        (4, 1, "data=8", "4 of 8 rows are padding"),
        (24, 2, "data=8", "multiple of 16"),
    ],
)
def test_rows_that_are_split_unevenly_are_named(rows, micro_batches, mesh, words):
    params = experiment_params()
    params.input.rows = rows
    params.step.micro_batches = micro_batches
    options = PlanOptions(mesh=mesh, strategy="data")
    plan = plan_experiment(params, topologies.get("cpu:8"), options)
    said = [note for note in plan.notes if "input.batch_rows" in note]
    assert len(said) == (words is not None)
    assert not said or words in said[0]
