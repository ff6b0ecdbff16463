"""The least bytes that a training step must communicate, by hand, and the bytes of compiled steps.

    python -m tests.runtime.sharded.least_bytes

prints both for each strategy, as a table.

The model translates with one table for both embeddings and the softmax. Bytes are those
of the collectives' results on one device, as `gshard-inspect --compile` counts them. Scalars, such
as the loss and the gradient's norm, are left out of the least.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence

import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.program import step_programs
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tasks.translation import TranslationTask
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.trainer import Trainer

# Rows and positions of each side, sizes of the model, experts, choices, vocabulary, layers a side.
B, L, M, H, E, K, V, LAYERS = 16, 16, 64, 128, 8, 2, 1024, 2
HEADS = 8
BYTES = 4
# Kinds of communication, and the collectives that are each.
KINDS = {
    "reduced": ("all-reduce", "reduce-scatter"),
    "gathered": ("all-gather",),
    "exchanged": ("all-to-all", "collective-permute"),
}


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes of each kind on one device, of one step."""

    reduced: float = 0
    gathered: float = 0
    exchanged: float = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(*(getattr(self, kind) + getattr(other, kind) for kind in KINDS))

    @property
    def total(self) -> float:
        """The bytes of all kinds."""
        return self.reduced + self.gathered + self.exchanged


@dataclasses.dataclass(frozen=True)
class Case:
    """A strategy on a mesh, and how far its compiled step may be from the least.

    Attributes:
      strategy: base strategies, joined by "_".
      mesh: the mesh.
      limit: the largest ratio of compiled to least bytes, gathered and exchanged included.
    """

    strategy: str
    mesh: str
    limit: float

    def uses(self, base: str) -> bool:
        """Returns whether a base strategy is part of this one."""
        return base in self.strategy.split("_")

    def size(self, *axes: str) -> int:
        """Returns the devices along axes; 1 for an axis that the mesh lacks."""
        sizes = dict(part.split("=") for part in self.mesh.split(","))
        return math.prod(int(sizes.get(axis, 1)) for axis in axes)

    @property
    def model(self) -> int:
        """The parts of heads, hidden dimensions and vocabulary."""
        return self.size("model") if self.uses("tensor") else 1

    @property
    def splits_batch(self) -> bool:
        """Whether any part splits the batch."""
        return any(map(self.uses, ("data", "expert", "folded", "fsdp", "zero1")))

    @property
    def batch(self) -> int:
        """The parts of the batch."""
        return self.size("data", "fsdp") if self.splits_batch else 1

    @property
    def folded(self) -> int:
        """The parts of a row's tokens in layers with experts."""
        return self.size("model") if self.uses("folded") else 1

    @property
    def experts(self) -> int:
        """The parts of the experts."""
        splits_experts = self.uses("expert") or self.uses("folded")
        return self.size("data") * self.folded if splits_experts else 1


CASES = (
    Case("data", "data=8", 1.01),
    Case("expert", "data=8", 1.01),
    Case("tensor", "model=8", 1.02),
    Case("fsdp", "data=8", 1.02),
    Case("zero1", "data=8", 1.02),
    Case("expert_zero1", "data=8", 1.02),
    Case("expert_tensor", "data=4,model=2", 1.02),
    Case("folded_tensor", "data=4,model=2", 1.02),
    Case("fsdp_tensor", "data=4,model=2", 1.02),
    Case("expert_fsdp", "data=4,fsdp=2", 1.02),
    Case("expert_fsdp_tensor", "data=2,fsdp=2,model=2", 1.02),
)


def least(case: Case) -> Bytes:
    """Returns the least bytes of a training step."""
    return _of_weights(case) + _of_activations(case) + _of_exchanges(case)


@dataclasses.dataclass(frozen=True)
class _Weights:
    """Weights that are split in the same way.

    Attributes:
      count: their elements.
      has_inner: whether they have N, H or V, which `tensor` splits.
      has_model: whether they have M, which `fsdp` and `zero1` split.
      has_experts: whether they have E, which `expert` splits.
      routes: whether they are of a router, which computes the tokens of its groups only.
    """

    count: int
    has_inner: bool = False
    has_model: bool = True
    has_experts: bool = False
    routes: bool = False


def weights() -> list[_Weights]:
    """Returns all weights of the model."""
    attentions = 3 * LAYERS
    norms = (2 + 3) * LAYERS + 2
    # Every second layer has experts.
    dense = experts = 2 * LAYERS // 2
    return [
        _Weights(V * M, has_inner=True),
        _Weights(attentions * 4 * M * M, has_inner=True),
        _Weights(dense * 2 * M * H, has_inner=True),
        _Weights(dense * H, has_inner=True, has_model=False),
        _Weights(dense * M + norms * 2 * M),
        _Weights(experts * M * E, routes=True),
        _Weights(experts * E * 2 * M * H, has_inner=True, has_experts=True),
    ]


def _of_weights(case: Case) -> Bytes:
    """Each gradient is reduced once over the devices that have other rows.

    `fsdp` gathers each weight once and `zero1` each new weight: those that have M, over the axes
    of the batch that do not split the experts.
    """
    total = Bytes()
    for group in weights():
        is_inner = group.has_inner and not (group.has_experts and case.folded > 1)
        local = group.count * BYTES / (case.model if is_inner else 1)
        others = case.batch * (case.folded if group.routes or group.has_experts else 1)
        if group.has_experts:
            local /= case.experts
            others //= case.experts
        is_gathered = group.has_model and (case.uses("fsdp") or case.uses("zero1"))
        if others > 1:
            total += Bytes(reduced=local, gathered=local if is_gathered else 0)
    return total


def _of_activations(case: Case) -> Bytes:
    """Each layer that `tensor` splits reduces its output, and the gradient of its input.

    So do both lookups in a table that is split by V, and the gradient of the softmax's input. All
    cross-attentions together reduce the gradient of the encoder's output once. Under `folded`,
    layers with experts gather both in place of reducing them.
    """
    if case.model == 1:
        return Bytes()
    layers = (2 + 3) * LAYERS
    folded = 2 * LAYERS // 2 if case.folded > 1 else 0
    lookups, softmax, memory = 2, 1, 1
    rows = B * L / case.batch * M * BYTES
    return Bytes(
        reduced=(2 * (layers - folded) + lookups + softmax + memory) * rows,
        gathered=2 * folded * rows,
    )


def _of_exchanges(case: Case) -> Bytes:
    """Each layer of experts sends the rows of all choices there and back, forward and backward."""
    if case.experts == 1:
        return Bytes()
    layers = 2 * LAYERS // 2
    return Bytes(exchanged=4 * layers * K * (B * L / case.batch / case.folded) * M * BYTES)


def compiled(case: Case, partitioner: str = "gspmd") -> Bytes:
    """Returns the bytes of the compiled training step."""
    total = Bytes()
    for call in executable(case, partitioner).collectives():
        kind = next(kind for kind, opcodes in KINDS.items() if call.kind in opcodes)
        total += Bytes(**{kind: call.bytes * call.times})
    return total


def executable(case: Case, partitioner: str = "gspmd") -> Executable:
    """Returns the compiled training step."""
    partitioning = Partitioning.make(case.mesh, case.strategy)
    program, _ = step_programs.train_program(trainer(), partitioning, partitioner, batch_specs())
    return Executable(program, devices_for(partitioning.mesh.size))


def trainer() -> Trainer:
    """Returns the trainer of the model."""
    task = TranslationTask.params().set(
        source_vocabulary_size=V, target_vocabulary_size=V, model_dim=M, share_embeddings=True
    )
    for stack in (task.encoder, task.decoder):
        stack.set(num_layers=LAYERS, num_heads=HEADS, hidden_dim=H)
        stack.moe.set(num_experts=E, group_size=L)
    return Trainer.params().set(optimizer=Adam.params()).instantiate(task)


def batch_specs() -> NestedMap:
    """Returns the shape and dtype of each feature of a batch."""
    names = ["target_inputs", "target_labels", "source_ids"]
    for side in ("source", "target"):
        names += [f"{side}_segments", f"{side}_positions"]
    return NestedMap({name: tf.TensorSpec((B, L), tf.int32) for name in names})


def table(cases: Sequence[Case] = CASES) -> str:
    """Returns a table of the compiled and the least bytes of each case, in KiB."""
    lines = [
        "| strategy | mesh | reduced | gathered | exchanged | total | least | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        found, wanted = compiled(case), least(case)
        pairs = [
            f"{getattr(found, kind) / 2**10:.0f} / {getattr(wanted, kind) / 2**10:.0f}"
            if getattr(found, kind)
            else ""
            for kind in KINDS
        ]
        totals = f"{found.total / 2**10:.0f} | {wanted.total / 2**10:.0f}"
        cells = [f"`{case.strategy}`", f"`{case.mesh}`", *pairs, totals]
        lines.append(f"| {' | '.join(cells)} | {found.total / wanted.total:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    # Before anything else uses jax, which makes its devices once.
    devices_for(8)
    sys.stdout.write(table() + "\n")
