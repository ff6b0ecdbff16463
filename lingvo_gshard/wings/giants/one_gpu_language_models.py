"""Language models whose training step fills one GPU, to measure it.

Each model has layers of the widths of a published model. `gshard-bench fill` chooses the number of
layers by the GPU's memory.
"""

from __future__ import annotations

from lingvo_gshard.core import Experiment, Params, registry
from lingvo_gshard.data import LanguageModelInput
from lingvo_gshard.data.sources.text import TextReader
from lingvo_gshard.layers import MixtureOfExperts, RMSNorm, Top2Router, TransformerStack
from lingvo_gshard.tasks import LanguageModelTask
from lingvo_gshard.training import Adam, RunOptions, Trainer
from lingvo_gshard.training.step.schedules import Cosine
from lingvo_gshard.wings.repeat.loop import Repeat

_VOCABULARY, _LENGTH = 32_000, 2048


@registry.register("language_model.one_gpu_dense")
def one_gpu_dense() -> Params:
    """A dense model to measure one GPU with: layers of Llama 2 7B, as many as fit.

    Purpose: the step time, memory and MFU of dense layers in bfloat16. The layers are copied from
    Llama 2 7B (arXiv 2307.09288, section 2.2): 4096 wide, 32 heads of 128, a swiglu of 11008,
    RMSNorm, rotary positions, a vocabulary of 32,000. Rows have 2,048 tokens.

        gshard-bench fill --experiment=language_model.one_gpu_dense --topology=gpu:h100:1x1 \\
            --folder=dense
    """
    return _experiment(4096, _decoder(heads=32, hidden_dim=11008), rows=8)


@registry.register("language_model.one_gpu_experts")
def one_gpu_experts() -> Params:
    """A sparse model to measure one GPU with: half as wide as Mixtral 8x7B, as deep as fits.

    Purpose: the step time, memory and MFU of mixtures of experts in bfloat16. Every layer has 8
    experts, two for a token, as in Mixtral 8x7B (arXiv 2401.04088, table 1), which is twice as
    wide: 2048 wide here, 16 heads of 128 with 4 of keys and values, a swiglu of 7168, RMSNorm,
    rotary positions, a vocabulary of 32,000. Rows have 2,048 tokens. Experts have capacity for
    1.25 times an even load, where Mixtral drops no token.

        gshard-bench fill --experiment=language_model.one_gpu_experts --topology=gpu:h100:1x1 \\
            --folder=experts
    """
    experts = 8
    decoder = _decoder(heads=16, hidden_dim=7168)
    decoder.set(
        moe_every=1,
        moe=MixtureOfExperts.params().set(
            num_experts=experts,
            group_size=_LENGTH,
            router=Top2Router.params().set(
                capacity_factor=1.25, auxiliary_loss_weight=0.01 * experts**2
            ),
        ),
    )
    decoder.moe.experts.activation = "swiglu"
    decoder.layer.self_attention.num_key_value_heads = 4
    return _experiment(2048, decoder, rows=16)


def _decoder(heads: int, hidden_dim: int) -> Params:
    decoder = TransformerStack.params().set(
        is_causal=True, num_layers=4, num_heads=heads, hidden_dim=hidden_dim, moe_every=0
    )
    decoder.execution = Repeat.params().set(rematerialize="products")
    decoder.layer.norm = RMSNorm.params()
    decoder.layer.self_attention.set(head_dim=128, rotary_fraction=1.0)
    decoder.layer.feed_forward.set(activation="swiglu", use_bias=False)
    return decoder


def _experiment(model_dim: int, decoder: Params, rows: int) -> Params:
    input_ = LanguageModelInput.params().set(
        corpus=TextReader.params(), batch_rows=rows, length=_LENGTH
    )
    input_.vocabulary.size = _VOCABULARY
    task = LanguageModelTask.params().set(
        model_dim=model_dim, decoder=decoder, add_positions=False, tie_softmax=False
    )
    step = Trainer.params().set(
        optimizer=Adam.params().set(beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1),
        schedule=Cosine.params().set(
            learning_rate=3e-4, warmup_steps=100, total_steps=1000, final_fraction=0.1
        ),
        clip_norm=1.0,
        precision="bfloat16",
    )
    run = RunOptions.params().set(steps=1000)
    params = Experiment.params().set(input=input_, task=task, step=step, run=run)
    params.sharding.set(mesh="data=1", strategy="data")
    return params
