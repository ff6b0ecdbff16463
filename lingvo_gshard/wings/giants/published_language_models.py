"""Published language models at their sizes: to train on pods, and to plan.

Each experiment follows its paper, and names what the paper leaves open and what differs here. All
repeat their layers in a loop that keeps only the inputs of layers and rows that devices exchange,
have float32 weights and compute bfloat16 activations. Several micro-batches make a step if the
activations of one would not fit.
"""

from __future__ import annotations

from lingvo_gshard.core import Experiment, Params, registry
from lingvo_gshard.data import LanguageModelInput
from lingvo_gshard.data.sources.text import TextReader
from lingvo_gshard.layers import (
    EinsumDispatch,
    LearnedPositions,
    MixtureOfExperts,
    RMSNorm,
    Top2Router,
    TransformerStack,
)
from lingvo_gshard.tasks import LanguageModelTask
from lingvo_gshard.training import Adam, RunOptions, Trainer
from lingvo_gshard.training.step.adafactor import Adafactor
from lingvo_gshard.training.step.schedules import Cosine, InverseSquareRoot, WarmupStableDecay
from lingvo_gshard.wings.published_layers.routers import SigmoidRouter
from lingvo_gshard.wings.repeat.loop import Repeat


@registry.register("language_model.gpt3_175b")
def gpt3_175b() -> Params:
    """GPT-3: 175 billion weights, dense, on 512 TPU v5p chips.

    Purpose: the dense baseline of many papers. Published (arXiv 2005.14165, table 2.1
    and appendix B): 96 layers of 12288, 96 heads of 128, 2,048 positions, 3.2 million tokens a
    batch, 300 billion in all, 3.14e23 FLOPs. Differences: attention is dense in every layer,
    where the paper alternates with locally banded patterns; projections have no biases; a batch has
    1,536 rows, so that it divides over many devices.

        gshard-plan --experiment=language_model.gpt3_175b --topology=v5p:8x8x8
    """
    decoder = TransformerStack.params().set(
        num_layers=96, num_heads=96, hidden_dim=4 * 12288, moe_every=0
    )
    decoder.layer.self_attention.head_dim = 128
    decoder.layer.feed_forward.activation = "gelu"
    task = _task(12288, decoder).set(positions=LearnedPositions.params().set(max_length=2048))
    step = Trainer.params().set(
        optimizer=Adam.params().set(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1),
        schedule=Cosine.params().set(
            learning_rate=6e-5, warmup_steps=120, total_steps=83_000, final_fraction=0.1
        ),
        clip_norm=1.0,
        micro_batches=4,
    )
    run = RunOptions.params().set(steps=95_000)
    input_ = _input(vocabulary=50_257, rows=1536, length=2048)
    return _experiment(input_, task, step, run, "data=64,model=8", "fsdp_tensor")


@registry.register("language_model.glam_64b_64e")
def glam_64b_64e() -> Params:
    """GLaM (64B/64E): 1.2 trillion weights, 97 billion used by a token, on 1,024 TPU v4 chips.

    Purpose: a mixture of experts as good as GPT-3 with half its FLOPs per token. Published
    (arXiv 2112.06905, table 4 and section 5): 64 layers of 8192, in every other one 64 experts of
    32768, two for a token; 128 heads of 128; a vocabulary of 256 thousand; gated GELU in the layers
    without experts; relative position biases instead of position embeddings; 1,024 tokens per row,
    a million per batch, 600 billion in all; Adafactor. Our choices where the paper is silent:
    experts use GELU, and 32 buckets cover distances up to 128, as in T5.

        gshard-plan --experiment=language_model.glam_64b_64e --topology=v4:8x8x16
    """
    experts = 64
    decoder = TransformerStack.params().set(
        num_layers=64,
        num_heads=128,
        hidden_dim=32768,
        moe_every=2,
        moe=MixtureOfExperts.params().set(
            num_experts=experts,
            group_size=1024,
            router=Top2Router.params().set(
                capacity_factor=1.0, auxiliary_loss_weight=0.01 * experts**2
            ),
            dispatch=EinsumDispatch.params(),
        ),
    )
    decoder.moe.experts.activation = "gelu"
    decoder.layer.self_attention.set(head_dim=128, relative_buckets=32)
    decoder.layer.feed_forward.set(activation="geglu", use_bias=False)
    task = _task(8192, decoder).set(add_positions=False)
    step = Trainer.params().set(
        optimizer=Adafactor.params(),
        schedule=InverseSquareRoot.params().set(learning_rate=1.0, decay_start=10_000),
        clip_norm=1.0,
    )
    run = RunOptions.params().set(steps=572_000)
    input_ = _input(vocabulary=256_000, rows=1024, length=1024)
    return _experiment(input_, task, step, run, "data=64,fsdp=16", "expert_fsdp")


@registry.register("language_model.deepseek_v3_like")
def deepseek_v3_like() -> Params:
    """After DeepSeek-V3: 675 billion weights, 41 billion used by a token, on 1,024 TPU v5p chips.

    Purpose: many small experts and a shared one, balanced by a bias. Published (arXiv
    2412.19437, section 4.2): 61 layers of 7168, the first three dense of 18432, then 1 shared and
    256 routed experts of 2048, 8 for a token, from 4 of 8 groups; 128 heads of 128, a vocabulary of
    129,280, rows of 4,096, up to 15,360 of them to a batch, 14.8 trillion tokens, on 2,048 GPUs.

    Differences: attention has 8 heads of keys and values for 128 of queries, not latent attention
    (61 * 62.5 million weights more: 675 billion instead of 671, 41 active instead of 37). Half of
    each head is rotated by position. One token is predicted, not two. Matrix products are bfloat16,
    not FP8. Experts have capacity for 1.25 times an even load, where the original drops no token.

        gshard-plan --experiment=language_model.deepseek_v3_like --topology=v5p:8x8x16
    """
    decoder = TransformerStack.params().set(
        num_layers=61,
        num_heads=128,
        hidden_dim=18432,
        dense_first=3,
        moe_every=1,
        moe=_deepseek_experts(),
    )
    decoder.layer.norm = RMSNorm.params()
    decoder.layer.self_attention.set(head_dim=128, num_key_value_heads=8, rotary_fraction=0.5)
    decoder.layer.feed_forward.set(activation="swiglu", use_bias=False)
    task = _task(7168, decoder).set(add_positions=False, tie_softmax=False)
    step = Trainer.params().set(
        optimizer=Adam.params().set(
            beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, moment_dtype="bfloat16"
        ),
        schedule=WarmupStableDecay.params().set(
            learning_rate=2.2e-4, warmup_steps=2000, decay_share=0.32, final_fraction=0.1
        ),
        clip_norm=1.0,
        micro_batches=15,
    )
    run = RunOptions.params().set(steps=235_000)
    input_ = _input(vocabulary=129_280, rows=15_360, length=4096)
    return _experiment(input_, task, step, run, "data=256,fsdp=4", "expert_fsdp")


def _deepseek_experts() -> Params:
    router = SigmoidRouter.params().set(
        k=8,
        scale=2.5,
        capacity_factor=1.25,
        auxiliary_loss_weight=1e-4,
        expert_groups=8,
        groups_per_token=4,
    )
    moe = MixtureOfExperts.params().set(
        num_experts=256,
        hidden_dim=2048,
        shared_hidden_dim=2048,
        group_size=4096,
        router=router,
    )
    moe.experts.activation = "swiglu"
    return moe


def _task(model_dim: int, decoder: Params) -> Params:
    policy = "exchanges" if decoder.moe_every else "full"
    decoder.set(is_causal=True, execution=Repeat.params().set(rematerialize=policy))
    return LanguageModelTask.params().set(model_dim=model_dim, decoder=decoder)


def _input(vocabulary: int, rows: int, length: int) -> Params:
    params = LanguageModelInput.params().set(
        corpus=TextReader.params(), batch_rows=rows, length=length
    )
    params.vocabulary.size = vocabulary
    return params


def _experiment(
    input_: Params, task: Params, step: Params, run: Params, mesh: str, strategy: str
) -> Params:
    step.precision = "bfloat16"
    params = Experiment.params().set(input=input_, task=task, step=step, run=run)
    params.sharding.set(mesh=mesh, strategy=strategy)
    return params
