"""Random combinations of what a user can choose for a training step on a mesh."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from lingvo_gshard.core.autodiff import remat_policy
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.attention.dense import DenseKernel
from lingvo_gshard.layers.moe import (
    EinsumDispatch,
    GatherDispatch,
    SwitchRouter,
    Top2Router,
    TopKRouter,
)
from lingvo_gshard.layers.stacks.execution import Sequential
from lingvo_gshard.tasks.language_model import LanguageModelTask
from lingvo_gshard.tasks.translation import TranslationTask
from lingvo_gshard.training.step.adafactor import Adafactor
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.schedules import Linear
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.long_inputs.blockwise import BlockwiseKernel
from lingvo_gshard.wings.long_inputs.ring import RingKernel
from lingvo_gshard.wings.long_inputs.ulysses import UlyssesKernel
from lingvo_gshard.wings.optimizers.lion import Lion
from lingvo_gshard.wings.optimizers.momentum import Momentum
from lingvo_gshard.wings.optimizers.muon import Muon
from lingvo_gshard.wings.pipeline.pipeline import Pipeline
from lingvo_gshard.wings.published_layers.routers import (
    ExpertChoiceRouter,
    ForcedBalanceRouter,
    HashRouter,
    SigmoidRouter,
    SinkhornRouter,
)
from lingvo_gshard.wings.repeat.loop import Repeat
from tests.runtime.combinations import architectures
from tests.runtime.combinations.architectures import ATTENTIONS, HEADS, LAYERS, SERVICES

T = TypeVar("T")
Made = tuple[type, Mapping[str, object]]

LENGTH, VOCABULARY = 8, 32

ROUTERS: dict[str, Made] = {
    "top2": (Top2Router, {}),
    "lingvo": (Top2Router, {"mode": "lingvo", "second_expert": "all"}),
    "switch": (SwitchRouter, {"jitter": 0.1}),
    "top3": (TopKRouter, {"k": 3, "z_loss_weight": 0.01}),
    "masked": (TopKRouter, {"k": 2, "output_masking_rate": 0.2, "auxiliary_loss_level": "batch"}),
    "sigmoid": (SigmoidRouter, {"k": 2}),
    "grouped": (
        SigmoidRouter,
        {"k": 1, "normalize": False, "expert_groups": 2, "groups_per_token": 1},
    ),
    "sinkhorn": (SinkhornRouter, {"allow_causal": True}),
    "expert_choice": (ExpertChoiceRouter, {"allow_causal": True}),
    "hash": (HashRouter, {"k": 2}),
    "balanced": (ForcedBalanceRouter, {}),
}
DISPATCHES: dict[str, Made] = {
    "gather": (GatherDispatch, {}),
    "einsum": (EinsumDispatch, {}),
    "dropless": (DroplessDispatch, {}),
    "bounded": (DroplessDispatch, {"bound": 64.0}),
}
STACKS: dict[str, Made] = {
    "sequential": (Sequential, {}),
    "loop": (Repeat, {}),
    "pipeline": (Pipeline, {"stages": 2}),
    "circular": (Pipeline, {"stages": 2, "circulations": 2}),
}
EXCHANGES: dict[str, Mapping[str, object]] = {
    "": {},
    "int8": {"precision": "int8"},
    "chunks": {"chunks": 2},
    "hierarchical": {"hierarchical": True},
}
# Precisions with settings of step.fp8.
FP8: dict[str, dict[str, Any]] = {
    "fp8_e4m3": {"gradients": "e4m3"},
    "fp8_delayed": {"delayed_scales": True},
}
NARROW = [
    *("bfloat16", "bfloat16_weights", "float16"),
    *("fp8", "fp8_blocks", "mxfp8", "nvfp4", "int8", *FP8),
]
OPTIMIZERS: dict[str, Made] = {
    "adafactor": (Adafactor, {"min_factored_size": 8}),
    "adam": (Adam, {"weight_decay": 0.1}),
    "adam_int8": (Adam, {"moment_dtype": "int8"}),
    "lion": (Lion, {}),
    "momentum": (Momentum, {"nesterov": True}),
    "muon": (Muon, {"weight_decay": 0.1, "per_head": True}),
    "sgd": (Momentum, {"beta": 0.0}),
}
KERNELS: dict[str, type] = {
    "dense": DenseKernel,
    "blockwise": BlockwiseKernel,
    "ring": RingKernel,
    "ulysses": UlyssesKernel,
}
DROPOUTS: dict[str, Mapping[str, object]] = {
    "": {},
    "residual": {"residual_dropout_rate": 0.2},
    "token": {"token_dropout_rate": 0.2},
    "attention": {"attention_dropout_rate": 0.2},
    "expert": {"moe.experts.dropout_rate": 0.2},
}
# Axes that a base strategy splits over.
AXES = {
    "data": ("data",),
    "expert": ("data",),
    "folded": ("data", "model"),
    "tensor": ("model",),
    "fsdp": ("data",),
    "zero1": ("data",),
    "sequence": ("model",),
    "context": ("context",),
    "pipeline": ("stage",),
}
TABLES = (
    ("activations: B,G->data | E->model", "data=2,model=2"),
    ("activations: B,G->data,model | E->data,model", "data=2,model=2"),
    ("activations: B,G->data,model | E->model; H->none", "data=2,model=2"),
    ("activations: B->data; G->data | E->data; M->model", "data=4,model=2"),
)


@dataclasses.dataclass(frozen=True)
class Combination:
    """One choice of everything. Names are keys of the tables above.

    Attributes:
      mesh: axes and sizes.
      strategy: base strategies or a table.
      task: "language_model", a decoder alone, or "translation".
      stack: how layers are run.
      rematerialize: the remat policy.
      router: of experts.
      dispatch: of experts.
      exchange: of experts.
      capacity: the router's capacity factor; 0 for its default.
      experts: size of E.
      group_size: size of S.
      layers: number of layers of a stack.
      moe_every: as in a TransformerStack.
      kernel: of the attention.
      dropout: what is dropped.
      lora: rank of adapters; 0 for none.
      micro_batches: of the trainer.
      optimizer: of the trainer.
      precision: of the trainer, with settings of `fp8`.
      clip_norm: of the trainer.
      average_decay: of the trainer.
      rows: of a batch.
      evaluates: whether an evaluation is compared, too.
      attention: self-attentions of consecutive layers.
      layer: other options of layers.
      head: options of a language model's task.
      service: other options of the trainer.
      is_packed: whether a row has two texts.
    """

    mesh: str = "data=4"
    strategy: str = "expert"
    task: str = "language_model"
    stack: str = "sequential"
    rematerialize: str = "none"
    router: str = "top2"
    dispatch: str = "gather"
    exchange: str = ""
    capacity: float = 0.0
    experts: int = 4
    group_size: int = 8
    layers: int = 2
    moe_every: int = 1
    kernel: str = "dense"
    dropout: str = ""
    lora: int = 0
    micro_batches: int = 1
    optimizer: str = "sgd"
    precision: str = "float32"
    clip_norm: float = 1.0
    average_decay: float = 0.0
    rows: int = 8
    evaluates: bool = False
    attention: str = ""
    layer: str = ""
    head: str = ""
    service: str = ""
    is_packed: bool = False

    @classmethod
    def draw(cls, seed: int) -> Combination:
        """Returns the combination of a seed. Usual choices are drawn more often than others."""
        rng = random.Random(seed)

        def often(usual: T, others: Sequence[T], share: float = 0.5) -> T:
            return usual if rng.random() < share else rng.choice(others)

        strategy, mesh = _layout(rng)
        has_stages = "pipeline" in strategy
        stack = often("loop", ["sequential", "sequential", "pipeline"], 0.5)
        if has_stages and rng.random() < 0.9:
            stack = rng.choice(["pipeline", "circular"])
        # Most of what is known to be refused is left out, so that most combinations run.
        is_pipeline = stack in ("pipeline", "circular")
        dispatches = [x for x in DISPATCHES if not is_pipeline or DISPATCHES[x][0].is_vectorizable]
        dispatch = often("gather" if is_pipeline else "dropless", dispatches, 0.5)
        is_buffered = dispatch in ("gather", "einsum")
        of_positions = rng.choice(["ring", "ulysses"])
        kernel = of_positions if "context" in strategy and not is_pipeline else "dense"
        task = often("language_model", ["translation"], 0.85)
        attentions = architectures.attentions_for(task, is_pipeline)
        # Each device draws its own dropout within dropless experts (docs/moe.md): nothing to equal.
        dropouts = [x for x in DROPOUTS if x != "expert" or is_buffered]
        return cls(
            mesh=mesh,
            strategy=strategy,
            task=task,
            stack=stack,
            rematerialize=rng.choice(["none", "none", *remat_policy.ON_DEVICE]),
            router=rng.choice(list(ROUTERS)),
            dispatch=dispatch,
            exchange=often("", list(EXCHANGES), 0.7 if is_buffered else 0.98),
            capacity=often(0.0, [1.0, 2.0], 0.7 if is_buffered else 0.98),
            experts=often(4, [2, 6, 8, 16]),
            group_size=rng.choice([4, 8, 16, 12, 64]),
            layers=often(2, [4], 0.1 if is_pipeline else 0.7),
            moe_every=often(1, [2, 0], 0.7),
            kernel=often(kernel, list(KERNELS), 0.9),
            dropout=often("", dropouts, 0.4),
            lora=often(0, [2], 0.8),
            micro_batches=often(1, [2, 4], 0.6),
            optimizer=rng.choice(list(OPTIMIZERS)),
            precision=often("float32", NARROW, 0.8),
            clip_norm=rng.choice([0.0, 1.0]),
            average_decay=often(0.0, [0.9], 0.8),
            rows=often(8, [4, 16, 12], 0.7),
            evaluates=rng.random() < 0.2,
            attention=often("", attentions, 0.4),
            layer=often("", list(LAYERS), 0.6),
            head=often("", list(HEADS), 0.7),
            service=often("", list(SERVICES), 0.8),
            is_packed=rng.random() < 0.4,
        )

    @property
    def is_exact(self) -> bool:
        """Whether all numbers are float32, so that a step can be compared in float64."""
        narrow = self.exchange == "int8", self.optimizer == "adam_int8", self.service == "reduced"
        return self.precision == "float32" and not any(narrow)

    def trainer(self) -> Trainer:
        """Returns the trainer. Raises ValueError if the combination is refused."""
        task = self._task()
        params = Trainer.params().set(
            clip_norm=self.clip_norm,
            optimizer=_made(OPTIMIZERS[self.optimizer]),
            schedule=Linear.params().set(learning_rate=0.01, warmup_steps=0, total_steps=40),
            micro_batches=self.micro_batches,
            precision="fp8" if self.precision in FP8 else self.precision,
            average_decay=self.average_decay,
        )
        params.fp8.set(**FP8.get(self.precision, {}))
        for path, value in SERVICES[self.service].items():
            params.set_path(path, value)
        return params.instantiate(task, steps=10)

    def _task(self) -> Params:
        if self.task == "translation":
            task = TranslationTask.params().set(
                source_vocabulary_size=VOCABULARY, target_vocabulary_size=VOCABULARY, model_dim=16
            )
            stacks = (task.encoder, task.decoder)
        else:
            task = LanguageModelTask.params().set(vocabulary_size=VOCABULARY, model_dim=16)
            task.set(**HEADS[self.head])
            stacks = (task.decoder,)
            if self.lora:
                weights = ("*.self_attention", "*.feed_forward", "*.experts")
                if self.moe_every == 0:
                    weights = weights[:2]
                task.lora.set(rank=self.lora, weights=weights)
        for stack in stacks:
            self._fill(stack)
        return task

    def _fill(self, stack: Params) -> None:
        stack.set(num_layers=self.layers, num_heads=4, hidden_dim=32, moe_every=self.moe_every)
        router = _made(ROUTERS[self.router])
        if self.capacity:
            router.capacity_factor = self.capacity
        stack.moe.set(
            num_experts=self.experts,
            group_size=self.group_size,
            router=router,
            dispatch=_made(DISPATCHES[self.dispatch]),
        )
        stack.moe.exchange.set(**EXCHANGES[self.exchange])
        stack.execution = _made(STACKS[self.stack]).set(rematerialize=self.rematerialize)
        stack.attention_pattern = ATTENTIONS[self.attention]()
        stack.num_layers *= len(stack.attention_pattern) or 1
        for attention in (stack.layer.self_attention, *stack.attention_pattern):
            if "kernel" in attention:
                attention.kernel = KERNELS[self.kernel].params()
        for path, value in DROPOUTS[self.dropout].items():
            stack.set_path(path, value)
        LAYERS[self.layer](stack)

    def batch(self, index: int = 0) -> dict[str, np.ndarray]:
        """Returns a batch of rows that end at different positions."""
        rng = np.random.default_rng(index)
        segments, positions = architectures.places(self.rows, LENGTH, self.is_packed, rng)
        translates = self.task == "translation"
        arrays = {}
        for side in ("source", "target") if translates else ("target",):
            arrays |= {f"{side}_segments": segments, f"{side}_positions": positions}
        names = ("target_inputs", "target_labels", *(["source_ids"] if translates else ()))
        for name in names:
            ids = rng.integers(3, VOCABULARY, (self.rows, LENGTH))
            arrays[name] = np.where(segments > 0, ids, 0).astype(np.int32)
        return arrays


def _layout(rng: random.Random) -> tuple[str, str]:
    """Returns a strategy and a mesh of 2 to 8 devices with the axes that it needs."""
    if rng.random() < 0.1:
        return rng.choice(TABLES)
    bases = rng.sample(list(AXES), rng.choice([1, 2, 2, 3]))
    axes = list(dict.fromkeys(axis for base in bases for axis in AXES[base]))
    if "expert" not in bases and len(axes) < 3 and rng.random() < 0.5:
        bases.append("expert")
        axes = list(dict.fromkeys([*axes, *AXES["expert"]]))
    if "data" in axes and len(axes) < 3 and rng.random() < 0.2:
        axes.insert(rng.randrange(len(axes) + 1), "fsdp")
    sizes = dict.fromkeys(axes, 2)
    if len(axes) == 1:
        sizes[axes[0]] = rng.choice([2, 3, 4, 8])
    elif len(axes) == 2 and rng.random() < 0.5:
        sizes[rng.choice(axes)] = 4
    return "_".join(bases), ",".join(f"{axis}={size}" for axis, size in sizes.items())


def _made(made: Made) -> Params:
    cls, values = made
    return cls.params().set(**values)
