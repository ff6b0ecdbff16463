"""How a model is set up for each kind of work: its Params, mesh and strategy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import lingvo_gshard
from docs.planned.models import Model
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.sharding.partitioning import Partitioning, use_partitioning
from lingvo_gshard.sharding.sharding_tables import weight_rows
from lingvo_gshard.tasks.token_task import TokenTask
from lingvo_gshard.training.experiments import make_trainer
from lingvo_gshard.wings.inference.layers import transformer
from lingvo_gshard.wings.inference.programs.maker import decoding_partitioning
from lingvo_gshard.wings.planning.machines.topologies import Topology

# Positions of a row in training, of which each device has one; and of a generated text.
TRAINED_LENGTH = 4096
GENERATED_LENGTH = 2048
# Rank of the adapters of fine-tuning.
RANK = 16
# Experts' buffers hold this many times the rows of balanced loads in training.
CAPACITY_FACTOR = 1.25

_BUFFERS = "task.decoder.moe.dispatch = @lingvo_gshard.layers.moe.dispatches.gather.GatherDispatch"
# Experts over `data`, and dense weights over both axes. The up-projections of latent attention have
# no M, and are split by heads.
_EXPERTS = "activations: B,G->fsdp,data; E->data | weights: E,N->data; M->fsdp,data"
# Where M does not divide evenly over all devices: another letter of each weight over `data`.
_UNEVEN = "activations: B,G->fsdp,data; E->data | weights: E,N,V,H->data; M->fsdp"
_REPLICAS = {"dense": "data_tensor", "experts": "expert_tensor"}
# Adam keeps two moments of the size of a gradient.
_MOMENTS = 2
# The part of the memory that what is known beforehand may fill; a step needs more besides.
_ROOM = {"training": 0.85, "generation": 0.9}


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is planned on one topology.

    Attributes:
      params: the experiment.
      mesh: axes and sizes.
      strategy: name or table of the strategy.
      fills: the least bytes of a device that it needs, as a part of the device's memory.
    """

    params: Params
    mesh: str
    strategy: str
    fills: float

    def partitioning(self) -> Partitioning:
        """Returns the partitioning."""
        return Partitioning.make(self.mesh, self.strategy)


def training(model: Model, topology: Topology, rank: int = 0) -> Setup:
    """Returns the setup of a training step: one row of TRAINED_LENGTH tokens for each device.

    Args:
      model: the model.
      topology: the machine.
      rank: that of LoRA's adapters of all weights of attention; 0 trains all weights.
    """
    precision = "bfloat16_weights" if rank else "bfloat16"
    settings = [
        *([f"task.lora.rank = {rank}", 'task.lora.weights = ("*.self_attention",)'] * bool(rank)),
        f"input.batch_rows = {topology.devices}",
        'task.decoder.execution.rematerialize = "full"',
    ]
    task = lingvo_gshard.open_model(model.config).task
    experts = _experts(task)
    mesh, strategy = f"data={topology.devices}", "fsdp"
    if experts:
        settings += [_BUFFERS, f"task.decoder.moe.router.capacity_factor = {CAPACITY_FACTOR}"]
        is_even = task.model_dim % topology.devices == 0
        parts = math.gcd(experts, topology.devices, task.decoder.num_heads)
        mesh = f"data={parts},fsdp={topology.devices // parts}"
        strategy = _EXPERTS if is_even else _UNEVEN
    params = lingvo_gshard.open_model(
        model.config, length=TRAINED_LENGTH, precision=precision, settings=settings
    )
    setup = Setup(params, mesh, strategy, 0.0)
    specs, partitioning = make_trainer(params).state_specs(), setup.partitioning()
    weights, moments = (
        sum(row.bytes_per_device for row in weight_rows(tree, partitioning, kind))
        for tree, kind in ((specs.theta, "weights"), (specs.moments, "moments"))
    )
    needed = weights + moments + moments // _MOMENTS
    return dataclasses.replace(setup, fills=needed / topology.chip.usable_bytes / _ROOM["training"])


def generation(model: Model, topology: Topology, batch: int) -> list[Setup]:
    """Returns setups of generating `batch` texts of GENERATED_LENGTH positions.

    These are the meshes that may fit, with the most replicas of the weights first; if none may fit,
    the one that needs the least memory.
    """
    params = lingvo_gshard.open_model(
        model.config, length=GENERATED_LENGTH, precision="bfloat16_weights"
    )
    experts = _experts(params.task)
    task = make_trainer(params).task
    found = []
    for data in _divisors(math.gcd(topology.devices, batch)):
        # Without an axis for rows and experts, the strategy has no such rule either.
        strategy = _REPLICAS["experts" if experts and data > 1 else "dense"]
        setup = Setup(params, f"data={data},model={topology.devices // data}", strategy, 0.0)
        partitioning = decoding_partitioning(setup.partitioning())
        weights = weight_rows(task.variable_specs(), partitioning)
        caches = _cache_bytes(task, partitioning, topology.devices // data)
        # Decoding repeats heads of keys, so that these weights may be split further.
        known = [row for row in weights if not row.path.endswith(("w_key", "w_value"))]
        needed = sum(row.bytes_per_device for row in known) + caches * batch // data
        fills = needed / topology.chip.usable_bytes / _ROOM["generation"]
        found.append(dataclasses.replace(setup, fills=fills))
    return [s for s in found if s.fills <= 1] or [min(found, key=lambda s: s.fills)]


def _cache_bytes(task: TokenTask, partitioning: Partitioning, heads: int) -> int:
    """Returns the bytes of a text's keys and values on each of the devices that split heads."""
    with use_partitioning(partitioning):
        layers = transformer.stack_cache_shapes(task.decoder, 1, GENERATED_LENGTH)
    shapes = [shape for layer in layers for shape in layer.values()]
    return sum(2 * math.prod(shape) // (heads if shape[1] % heads == 0 else 1) for shape in shapes)


def _experts(task: Params) -> int:
    """Returns the number of experts of a layer; 0 for a dense model."""
    decoder = task.decoder
    return decoder.moe.num_experts if decoder.moe_every else 0


def _divisors(count: int) -> Iterator[int]:
    """Yields all divisors, the largest first."""
    return (size for size in range(count, 0, -1) if count % size == 0)
