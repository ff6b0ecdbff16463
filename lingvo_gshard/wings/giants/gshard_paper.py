"""Models of the GShard paper (arXiv 2006.16668) at its sizes: to train on pods, and to plan.

All use the task and the layers of the quickstart. The paper states dimensions, optimizer,
precision, cores and tokens per batch (section 4.1, appendix A.2). Our choices for what it does not
state are: rows of LENGTH positions; groups of GROUP tokens, which is one core's share of the batch
on 512 and on 2,048 cores; target embedding and softmax tied; k = 0.01 and label smoothing 0.1, as
in Google's code.
"""

from __future__ import annotations

from lingvo_gshard.core import Experiment, Params, registry
from lingvo_gshard.data import TranslationInput, tsv
from lingvo_gshard.layers import (
    CrossAttention,
    EinsumDispatch,
    MixtureOfExperts,
    SelfAttention,
    Sequential,
    Top2Router,
    TransformerLayer,
    TransformerStack,
)
from lingvo_gshard.tasks import TranslationTask
from lingvo_gshard.training import RunOptions, Trainer
from lingvo_gshard.training.step.adafactor import Adafactor
from lingvo_gshard.training.step.schedules import InverseSquareRoot
from lingvo_gshard.wings.repeat.loop import Repeat

MODEL_DIM, HIDDEN_DIM, NUM_HEADS, HEAD_DIM = 1024, 8192, 16, 128
SOURCE_VOCABULARY, TARGET_VOCABULARY = 64_000, 32_000
DROPOUT = 0.1
LENGTH, GROUP = 128, 2048
MILLION = 2**20


@registry.register("gshard_paper.moe_128e_12l")
def moe_128e_12l() -> Params:
    """MoE(128E, 12L): 12.5 billion weights on 128 TPU v3 cores.

    Purpose: the paper's smallest mixture. Published: 1.9 core-years, 5.4 days, 36.7 BLEU over 100
    languages to English.

        gshard-plan --experiment=gshard_paper.moe_128e_12l --topology=v3:8x8
    """
    return _mixture(experts=128, layers=12, batch=MILLION)


@registry.register("gshard_paper.moe_128e_36l")
def moe_128e_36l() -> Params:
    """MoE(128E, 36L): 37 billion weights on 128 TPU v3 cores.

    Purpose: depth at the smallest number of experts. Published: 6.1 core-years, 17.3 days, 39.0
    BLEU over 100 languages to English.

        gshard-plan --experiment=gshard_paper.moe_128e_36l --topology=v3:8x8
    """
    return _mixture(experts=128, layers=36, batch=MILLION)


@registry.register("gshard_paper.moe_512e_12l")
def moe_512e_12l() -> Params:
    """MoE(512E, 12L): 50 billion weights on 512 TPU v3 cores.

    Purpose: the model whose memory and speed the paper gives. Published: 3.28 steps/s, 4.9
    core-years, 3.5 days, 40.0 BLEU over 100 languages to English.

        gshard-plan --experiment=gshard_paper.moe_512e_12l --topology=v3:16x16
    """
    return _mixture(experts=512, layers=12, batch=MILLION)


@registry.register("gshard_paper.moe_512e_36l")
def moe_512e_36l() -> Params:
    """MoE(512E, 36L): 150 billion weights on 512 TPU v3 cores.

    Purpose: the best model on 512 cores. Published: 1.05 steps/s, 15.5 core-years, 11.0
    days, 43.7 BLEU over 100 languages to English.

        gshard-plan --experiment=gshard_paper.moe_512e_36l --topology=v3:16x16
    """
    return _mixture(experts=512, layers=36, batch=MILLION)


@registry.register("gshard_paper.moe_2048e_12l")
def moe_2048e_12l() -> Params:
    """MoE(2048E, 12L): 200 billion weights on 2,048 TPU v3 cores.

    Purpose: the most experts at the smallest depth. Published: 7.5 core-years, 1.4 days, 41.3 BLEU
    over 100 languages to English.

        gshard-plan --experiment=gshard_paper.moe_2048e_12l --topology=v3:32x32
    """
    return _mixture(experts=2048, layers=12, batch=4 * MILLION)


@registry.register("gshard_paper.moe_2048e_36l")
def moe_2048e_36l() -> Params:
    """MoE(2048E, 36L): the paper's 600 billion weights on 2,048 TPU v3 cores.

    Purpose: the model of the paper's title. Published: 22.4 core-years, 4.0 days, 44.3 BLEU over
    100 languages to English.

        gshard-plan --experiment=gshard_paper.moe_2048e_36l --topology=v3:32x32
    """
    return _mixture(experts=2048, layers=36, batch=4 * MILLION)


@registry.register("gshard_paper.moe_2048e_60l")
def moe_2048e_60l() -> Params:
    """MoE(2048E, 60L): one trillion weights on 2,048 TPU v3 cores, with bfloat16 activations.

    Purpose: the largest model that the paper trained. Published: no result, because training was
    numerically unstable.

        gshard-plan --experiment=gshard_paper.moe_2048e_60l --topology=v3:32x32
    """
    params = _mixture(experts=2048, layers=60, batch=4 * MILLION)
    params.step.precision = "bfloat16"
    return params


@registry.register("gshard_paper.dense_96l")
def dense_96l() -> Params:
    """T(96L): a dense Transformer of 2.3 billion weights on 2,048 TPU v3 cores.

    Purpose: the cost of depth without experts. Published: trained in a pipeline by GPipe, 235.5
    core-years, 42 days, 36.9 BLEU over 100 languages to English. Here the strategy is fsdp, which
    splits batch and weights. Heads have size 64, which gives the published 2.3 billion weights;
    128, as in the mixtures, would give 2.9 billion.

        gshard-plan --experiment=gshard_paper.dense_96l --topology=v3:32x32
    """
    return _experiment(_stack(layers=96, head_dim=64), 4 * MILLION, "data=2048", "fsdp")


@registry.register("gshard_paper.bilingual")
def bilingual() -> Params:
    """A bilingual baseline: a dense Transformer of 0.4 billion weights for one language.

    Purpose: the baseline of each of the paper's 100 languages. Published: 29 core-years for all
    100, 30.8 BLEU on average. The paper does not state batch and cores: here 8 cores with 2,048
    tokens each.

        gshard-plan --experiment=gshard_paper.bilingual --topology=v3:2x2
    """
    params = _experiment(_stack(layers=12), 2048 * 8, "data=8", "data")
    params.input.vocabulary.set(size=TARGET_VOCABULARY, target_size=TARGET_VOCABULARY)
    return params


def _mixture(experts: int, layers: int, batch: int) -> Params:
    """Returns an experiment with one expert of each mixture per core."""
    stack = _stack(layers)
    stack.moe_every = 2
    stack.moe = MixtureOfExperts.params().set(
        num_experts=experts,
        group_size=GROUP,
        router=Top2Router.params().set(
            mode="paper",
            capacity_factor=1.0,
            second_expert="random",
            auxiliary_loss_weight=0.01 * experts**2,
        ),
        dispatch=EinsumDispatch.params(),
    )
    return _experiment(stack, batch, f"data={experts}", "expert")


def _stack(layers: int, head_dim: int = HEAD_DIM) -> Params:
    """Returns the encoder, or the decoder but for its cross-attention: half of `layers` each.

    The paper spent no cycles on rematerialization at 12 layers, 28% at 36 and 34% at 60 (section
    5.2). Here stacks of more than 12 layers rematerialize everything but the layers' inputs.
    """
    is_deep = layers > 12
    layer = TransformerLayer.params().set(
        self_attention=SelfAttention.params().set(head_dim=head_dim),
        cross_attention=CrossAttention.params().set(head_dim=head_dim),
    )
    return TransformerStack.params().set(
        num_layers=layers // 2,
        model_dim=MODEL_DIM,
        num_heads=NUM_HEADS,
        hidden_dim=HIDDEN_DIM,
        moe_every=0,
        layer=layer,
        execution=Repeat.params().set(rematerialize="full") if is_deep else Sequential.params(),
        input_dropout_rate=DROPOUT,
        residual_dropout_rate=DROPOUT,
        attention_dropout_rate=DROPOUT,
    )


def _experiment(stack: Params, batch: int, mesh: str, strategy: str) -> Params:
    params = Experiment.params()
    params.input = TranslationInput.params().set(
        corpus=tsv.TsvReader.params(),
        temperature=5.0,
        batch_rows=batch // LENGTH,
        source_length=LENGTH,
        target_length=LENGTH,
    )
    params.input.vocabulary.set(joint=False, size=SOURCE_VOCABULARY, target_size=TARGET_VOCABULARY)
    params.task = TranslationTask.params().set(
        model_dim=MODEL_DIM,
        encoder=stack,
        decoder=stack.copy().set(is_decoder=True),
        label_smoothing=0.1,
    )
    params.step = Trainer.params().set(
        optimizer=Adafactor.params(),
        schedule=InverseSquareRoot.params(),
    )
    params.run = RunOptions.params().set(steps=500_000)
    params.sharding.set(mesh=mesh, strategy=strategy)
    return params
