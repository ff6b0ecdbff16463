"""Makes loads of routers from random choices of tokens, with what a loop counts of them."""

from __future__ import annotations

import msgspec
import numpy as np

from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.planning.loads.devices import ExpertDevices
from lingvo_gshard.wings.planning.loads.layers import ExpertLayer
from lingvo_gshard.wings.planning.plan.plan import CollectiveRow, LayerRow, Plan
from lingvo_gshard.wings.services.routers.router_records import RouterRecord
from tests.planning import example_plan

LAYER = "decoder.layers[1].feed_forward"
SCOPE = "decoder/layers_1/feed_forward"
GROUPS, SIZE, EXPERTS, CHOICES = 8, 24, 8, 2
STEP_SECONDS, EXPERTS_SECONDS, EXCHANGE_SECONDS = 1.0, 0.3, 0.02


def choose(seed: int, groups: int = GROUPS, size: int = SIZE) -> np.ndarray:
    """Returns the experts [G,S,k] that tokens choose. Some are chosen more often, by all seeds."""
    rng = np.random.default_rng(seed)
    shares = np.random.default_rng(99).permutation((1.0 + np.arange(EXPERTS)) ** -0.9)
    scores = rng.gumbel(size=(groups, size, EXPERTS)) + np.log(shares)
    return np.argsort(-scores, -1)[..., :CHOICES]


def record_of(chosen: np.ndarray, step: int, capacity: int, layer: str = LAYER) -> RouterRecord:
    """Returns the record of choices. All first choices get positions before the second ones."""
    groups, size, _ = chosen.shape
    by_group = np.zeros((groups, EXPERTS), int)
    positions = np.zeros(size, int)
    kept = np.zeros(EXPERTS, int)
    for g, choice, token in np.ndindex(groups, CHOICES, size):
        expert = chosen[g, token, choice]
        positions[by_group[g, expert]] += 1
        kept[expert] += by_group[g, expert] < capacity
        by_group[g, expert] += 1
    choices = by_group.sum(0)
    return RouterRecord(
        step=step,
        layer=layer,
        router="Top2Router",
        experts_per_token=2.0,
        tokens=groups * size,
        choices=choices.tolist(),
        kept=kept.tolist(),
        dropped_share=1 - float(kept.sum() / choices.sum()),
        load_entropy=0.0,
        groups=groups,
        group_size=size,
        capacity=capacity,
        positions=np.trim_zeros(positions, "b").tolist(),
        by_part=by_group.tolist(),
    )


def layer_of(
    mesh: str = "data=4",
    group_axes: tuple[str, ...] = ("data",),
    expert_axes: tuple[str, ...] = ("data",),
    path: str = LAYER,
    **values: object,
) -> ExpertLayer:
    """Returns a layer with the example's groups, of capacity buffers unless `values` say more."""
    given = {
        "path": path,
        "scope": SCOPE,
        "times": 1,
        "router": "Top2Router",
        "dispatch": "GatherDispatch",
        "num_experts": EXPERTS,
        "experts_per_token": 2.0,
        "limits": True,
        "is_dropless": False,
        "bound": 0.0,
        "drops": False,
        "is_gathered": False,
        "micro_batches": 1,
        "groups": GROUPS,
        "group_size": SIZE,
        "capacity": 6,
        "devices": ExpertDevices(Mesh.parse(mesh), group_axes, expert_axes, EXPERTS),
    }
    return ExpertLayer(**{**given, **values})


def dropless(**values: object) -> ExpertLayer:
    """Returns a layer with a dropless dispatch."""
    given = {"dispatch": "DroplessDispatch", "limits": False, "is_dropless": True, "capacity": SIZE}
    return layer_of(**{**given, **values})


def _layer_row(layer: str, phase: str, seconds: float) -> LayerRow:
    names = ("compute_seconds", "memory_seconds", "communication_seconds", "seconds_bound")
    return LayerRow(
        layer=layer,
        phase=phase,
        times=1,
        flops=1,
        bytes=1,
        seconds=seconds,
        **dict.fromkeys(names, 0.0),
    )


def _collective(kind: str, layer: str, seconds: float) -> CollectiveRow:
    given = {"axis": "data", "phase": "forward", "dtype": "float32", "bytes": 8, "count": 1}
    return CollectiveRow(
        kind=kind, layer=layer, seconds=seconds, seconds_bound=0.0, share=0.0, **given
    )


def plan() -> Plan:
    """Returns a plan whose experts take 0.3 of a second, 0.1 of them to gather weights."""
    weight = example_plan.as_plan(example_plan.example_plan()).tensors[0]
    weights = [
        msgspec.structs.replace(
            weight, layer=f"{SCOPE}/experts", layout="EMH", bytes=EXPERTS * 1000, kind=kind
        )
        for kind in ("weights", "moments")
    ]
    return msgspec.structs.replace(
        example_plan.as_plan(example_plan.example_plan()),
        seconds_per_step=STEP_SECONDS,
        tensors=weights,
        layers=[
            _layer_row(f"{SCOPE}/experts", "forward", 0.15),
            _layer_row(f"{SCOPE}/experts/dropout", "backward", 0.25),
            _layer_row(f"{SCOPE}/experts", "optimizer", 3.0),
            _layer_row(f"{SCOPE}/experts_of_another", "forward", 7.0),
        ],
        collectives=[
            _collective("all-gather", f"{SCOPE}/experts", 0.1),
            _collective("all-to-all", SCOPE, EXCHANGE_SECONDS),
            _collective("all-to-all", f"{SCOPE}_1", 5.0),
        ],
    )
