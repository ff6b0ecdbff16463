"""The layers with experts of a planned training step: buffers, groups, and who computes what."""

from __future__ import annotations

import collections
import dataclasses

from lingvo_gshard.core import Context, Layer, context, known_sizes, random_numbers, scope_name, tf
from lingvo_gshard.layers import Execution, Groups, MixtureOfExperts
from lingvo_gshard.sharding import Partitioning
from lingvo_gshard.tasks import BatchSpecs
from lingvo_gshard.training import Trainer
from lingvo_gshard.wings.dropless.dispatch import DROP
from lingvo_gshard.wings.dropless.exchanges import default_exchange
from lingvo_gshard.wings.planning.loads.devices import ExpertDevices


@dataclasses.dataclass(frozen=True)
class ExpertLayer:
    """A layer with experts of a planned step. Groups (G of S tokens) are of one micro-batch.

    Attributes:
      path: path of the layer; layers of a loop have the paths that they have without it.
      scope: name scope of its operations in the compiled step.
      times: number of layers that share the scope, because a loop runs them.
      experts_per_token: experts of a token by the router's Params.
      limits: whether the experts' buffers have a capacity that tokens can exceed.
      is_dropless: whether experts compute exactly the rows that they get.
      bound: the dropless dispatch's bound; 0 for none.
      drops: whether rows over the bound are dropped, and not computed in further rounds.
      is_gathered: whether each device of a dropless dispatch gets the tokens of all devices.
      micro_batches: parts of the batch that are routed one after another.
    """

    path: str
    scope: str
    times: int
    router: str
    dispatch: str
    num_experts: int
    experts_per_token: float
    limits: bool
    is_dropless: bool
    bound: float
    drops: bool
    is_gathered: bool
    micro_batches: int
    groups: int
    group_size: int
    capacity: int
    devices: ExpertDevices

    @property
    def rows(self) -> float:
        """The rows of all experts in one micro-batch if no token is padding or dropped."""
        return self.groups * self.group_size * self.experts_per_token

    def capacity_factor(self, capacity: int) -> float:
        """Returns the capacity factor that gives experts `capacity` slots for each group."""
        even = self.group_size * self.experts_per_token / self.num_experts
        # Rounded up, since routers round the slots down.
        return random_numbers.ceil(capacity / even * 1e4) / 1e4


def expert_layers(
    trainer: Trainer, batch: BatchSpecs, partitioning: Partitioning
) -> list[ExpertLayer]:
    """Returns the layers with experts of a trainer's step, in the order of the model."""
    bodies = _bodies(trainer.task)
    if not bodies:
        return []
    seen = _observed(trainer, batch)
    return [
        _expert_layer(layer, path, len(paths), seen[layer.path], trainer, partitioning)
        for layer, paths in bodies
        for path in paths
    ]


def _bodies(layer: Layer) -> list[tuple[MixtureOfExperts, list[str]]]:
    """Returns the mixtures below a layer, each with its paths without loops."""
    if isinstance(layer, MixtureOfExperts):
        return [(layer, [layer.path])]
    found = [body for child in layer.child_layers() for body in _bodies(child)]
    if isinstance(layer, Execution):
        of = layer.repetition.paths
        # A loop within a loop has no more names than its own.
        found = [(moe, of(paths[0]) if len(paths) == 1 else paths) for moe, paths in found]
    return found


@dataclasses.dataclass
class _Observed:
    """A layer's work in one micro-batch: B rows of L tokens, in so many capacity slots."""

    rows: int = 0
    length: int = 0
    slots: float = 0.0


def _observed(trainer: Trainer, batch: BatchSpecs) -> dict[str, _Observed]:
    """Returns what the layers compute, by their paths, from a trace of the forward pass."""
    found: dict[str, _Observed] = collections.defaultdict(_Observed)

    def observe(path: str, value: tf.Tensor) -> None:
        layer, _, name = path.partition("/")
        if name == "slots":
            found[layer].slots = float(tf.get_static_value(value))
        elif not name and value.shape.rank == 3:
            found[layer].rows, found[layer].length = known_sizes(value.shape)[:2]

    def forward(theta: list, features: dict) -> tf.Tensor:
        weights = trainer.theta_specs.pack(theta)
        with context.use(Context(True, tf.zeros([2], tf.int32), on_output=observe)):
            loss, _ = trainer.task.loss(weights, features)
        return loss

    weights = [tf.TensorSpec(s.shape, s.dtype) for s in trainer.theta_specs.flatten()]
    parts = trainer.p.micro_batches
    features = {
        name: tf.TensorSpec([spec.shape[0] // parts, *spec.shape[1:]], spec.dtype)
        for name, spec in batch.items()
    }
    tf.function(forward, autograph=False).get_concrete_function(weights, features)
    return found


def _expert_layer(
    layer: MixtureOfExperts,
    path: str,
    times: int,
    seen: _Observed,
    trainer: Trainer,
    partitioning: Partitioning,
) -> ExpertLayer:
    p = layer.p
    groups = Groups.for_batch(seen.rows, seen.length, p.group_size)
    router = layer.router
    is_dropless = p.dispatch.cls.is_dropless
    devices = ExpertDevices.of(partitioning, layer.path, p.num_experts, is_dropless)
    experts_per_token = float(router.experts_per_token(router.p))
    exchange = is_dropless and (
        p.dispatch.exchange
        or default_exchange(
            partitioning.platform, devices.parts, experts_per_token, p.dispatch.bound
        )
    )
    return ExpertLayer(
        path=path,
        scope=scope_name(layer.path),
        times=times,
        router=type(router).__name__,
        dispatch=p.dispatch.cls.__name__,
        num_experts=p.num_experts,
        experts_per_token=experts_per_token,
        limits=router.capacity.tokens_choose and not is_dropless,
        is_dropless=is_dropless,
        bound=float(p.dispatch.bound) if is_dropless else 0.0,
        is_gathered=exchange == "gathered" or (is_dropless and p.exchange.hierarchical),
        drops=is_dropless and p.dispatch.over_bound == DROP,
        micro_batches=trainer.p.micro_batches,
        groups=groups.count,
        group_size=groups.size,
        capacity=round(seen.slots / groups.count / p.num_experts),
        devices=devices,
    )
