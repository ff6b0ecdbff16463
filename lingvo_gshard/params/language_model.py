"""Experiments in language modeling: a small model to train on any machine, and your own text."""

from __future__ import annotations

from lingvo_gshard.core import Experiment, Params, registry
from lingvo_gshard.data.language_model_input import LanguageModelInput
from lingvo_gshard.data.sources.text import TextReader
from lingvo_gshard.layers import RMSNorm, TransformerStack
from lingvo_gshard.layers.moe import MixtureOfExperts, Top2Router
from lingvo_gshard.tasks.language_model import LanguageModelTask
from lingvo_gshard.training import OPTIMIZERS, Linear, RunOptions, Trainer


@registry.register("language_model.quickstart")
def quickstart() -> Params:
    """A language model of software messages, with experts (minutes on 2 cores).

    Purpose: to see a sparse language model learn on any machine. The text is the English side of
    the embedded corpus, 27,364 messages of free programs. The model is a decoder-only Transformer
    of 4 layers with 8 experts in every other layer, as in GLaM (arXiv 2112.06905), with rotary
    positions, swiglu and RMSNorm.

    Time: 5 minutes on 2 CPU cores. Result: 1.61 bits per byte of test, perplexity 34 per token of a
    vocabulary of 2,000 (docs/language_model.md).

        gshard-train --experiment=language_model.quickstart --logdir=runs/language_model
        gshard-evaluate --logdir=runs/language_model
    """
    input_ = LanguageModelInput.params().set(batch_rows=32, length=96)
    input_.vocabulary.size = 2000
    return Experiment.params().set(
        input=input_,
        task=_small_model(),
        step=Trainer.params().set(
            optimizer=OPTIMIZERS["muon"].params().set(iterations=3),
            schedule=Linear.params().set(learning_rate=1e-2, warmup_steps=100),
            clip_norm=1.0,
        ),
        run=RunOptions.params().set(
            steps=1000, log_every_steps=50, checkpoint_every_steps=500, evaluate_every_steps=250
        ),
    )


@registry.register("language_model.from_files")
def from_files() -> Params:
    """Your own text: a language model of files, plain, .gz or .xz.

    Purpose: the quickstart's model on any text. A document is a paragraph, a line or a file, as
    input.corpus.document chooses. Dev and test are held out of the training files unless you give
    files for them.

    Time: 5 minutes on 2 CPU cores, as the quickstart; set run.steps for more text. Result: depends
    on the text. Below some hundred thousand words there is little to learn.

        gshard-train --experiment=language_model.from_files --logdir=runs/mine \\
            '--input.corpus.train=books/*.txt.gz'

    With one document per line, and your own dev and test files:

        gshard-train --experiment=language_model.from_files --logdir=runs/mine \\
            --input.corpus.document=line --input.corpus.train=train.txt \\
            --input.corpus.dev=dev.txt --input.corpus.test=test.txt
    """
    params = quickstart()
    params.input.corpus = TextReader.params()
    return params


def _small_model() -> Params:
    experts, hidden_dim = 8, 256
    decoder = TransformerStack.params().set(
        is_causal=True,
        num_layers=4,
        num_heads=4,
        hidden_dim=hidden_dim,
        moe_every=2,
        moe=MixtureOfExperts.params().set(
            num_experts=experts,
            group_size=192,
            router=Top2Router.params().set(
                capacity_factor=1.0,
                evaluation_capacity_factor=float(experts),
                auxiliary_loss_weight=0.01 * experts**2,
            ),
        ),
        input_dropout_rate=0.2,
        residual_dropout_rate=0.2,
    )
    decoder.layer.norm = RMSNorm.params()
    decoder.layer.self_attention.rotary_fraction = 1.0
    decoder.layer.feed_forward.set(activation="swiglu", use_bias=False)
    decoder.moe.experts.activation = "swiglu"
    return LanguageModelTask.params().set(model_dim=128, decoder=decoder, add_positions=False)
