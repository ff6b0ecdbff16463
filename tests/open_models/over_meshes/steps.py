"""Training steps of small published models over eight devices, beside one on one device."""

import lingvo_gshard as gshard
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.wings.verification.findings import Verification
from tests.layers.stacks.executions import loop, pipeline

# Name -> mesh, strategy, how the layers are run.
MESHES = {
    "data": ("data=8", "data", loop()),
    "fsdp": ("data=8", "fsdp", loop("full")),
    "tensor and expert": ("data=4,model=2", "expert_tensor", loop("products")),
    "pipeline": (
        "stage=2,data=2,model=2",
        "P->stage; B,G->data; E->data; H,N,V->model",
        pipeline(2),
    ),
}


def verified(experiment: Params, mesh: str, strategy: str) -> Verification:
    """Compares a step over devices with one on one device, in float64; they are equal."""
    found = gshard.verify(experiment, mesh=mesh, strategy=strategy, shrink=False)
    assert found.is_equal and found.largest.difference.relative < 1e-9, found.lines()
    return found
