# tests: wings/verification/experiment.py, wings/verification/synthetic.py
"""Tests that library layers are equal in loops, pipelines, micro-batches and remat units."""

import pytest

import lingvo_gshard
from tests.tools.tiny_quickstart import EXPERIMENT, SETTINGS

_STACKS = "@lingvo_gshard.layers.stacks"
_FOUR_LAYERS = ("task.encoder.num_layers = 4", "task.encoder.moe_every = 2")
# Name -> mesh, strategy, settings.
CASES = {
    "loop": (
        "data=4,model=2",
        "expert_tensor",
        (*_FOUR_LAYERS, f"task.encoder.execution = {_STACKS}.repeat.Repeat"),
    ),
    "pipeline": (
        "stage=2,data=2,model=2",
        "P->stage; B,G->data; E->data; H,N,V->model",
        (*_FOUR_LAYERS, f"task.encoder.execution = {_STACKS}.pipeline.Pipeline"),
    ),
    "micro_batches": ("data=8", "fsdp", ("step.micro_batches = 2",)),
    "lora": (
        "data=2,model=2",
        "expert_tensor",
        (
            "task.lora.rank = 4",
            "task.lora.input_dropout = 0.1",
            "task.encoder.execution.rematerialize = 'products'",
        ),
    ),
    "remat": ("data=8", "expert", ("task.encoder.execution.rematerialize = 'products'",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_output_of_every_layer_is_equal(case):
    mesh, strategy, settings = CASES[case]
    params = lingvo_gshard.experiment(EXPERIMENT, [*SETTINGS, *settings])
    found = lingvo_gshard.verify(params, mesh=mesh, strategy=strategy)
    assert found.is_equal and found.largest.difference.relative < 1e-12, found.lines()
    outputs = {each.name for each in found.compared if each.kind == "output"}
    layers = range(4 if _FOUR_LAYERS[0] in settings else 1)
    for path in ("self_attention", "feed_forward"):
        assert {f"encoder.layers[{i}].{path}" for i in layers} <= outputs
