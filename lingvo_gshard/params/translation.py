"""Experiments in translation: many languages to English with a mixture of experts."""

from __future__ import annotations

from lingvo_gshard.core import Experiment, Params, registry
from lingvo_gshard.data.sources.tsv import TsvReader
from lingvo_gshard.data.translation_input import TranslationInput
from lingvo_gshard.layers import FeedForward, TransformerStack
from lingvo_gshard.layers.moe import MixtureOfExperts, Top2Router
from lingvo_gshard.tasks.translation import TranslationTask
from lingvo_gshard.training import OPTIMIZERS, Linear, RunOptions, Trainer

TEN_LANGUAGES = ("es", "pt", "pt_BR", "it", "ca", "fr", "de", "nl", "sv", "gl")


@registry.register("translation.quickstart")
def quickstart() -> Params:
    """Ten related languages to English, learned while you wait (minutes on 2 cores).

    Purpose: to see a sparse model learn a real task on any machine. The data are 204 thousand pairs
    of the embedded corpus: messages of free programs in Spanish, Portuguese (of Portugal and of
    Brazil), Italian, Catalan, French, German, Dutch, Swedish and Galician. The model is a
    Transformer of 2 + 2 layers with 8 experts in every other layer.

    Time: 10 minutes on 2 CPU cores. Result: chrF 54 and BLEU 32 on the test rows, averaged over the
    ten languages (docs/results.md).

        gshard-train --experiment=translation.quickstart --logdir=runs/quickstart
        gshard-evaluate --logdir=runs/quickstart
        gshard-translate --logdir=runs/quickstart
    """
    return Experiment.params().set(
        input=_embedded_corpus(TEN_LANGUAGES, temperature=1.0),
        task=_task(model_dim=128, hidden_dim=512, num_heads=4, num_layers=2, num_experts=8),
        step=_step(),
        run=_run(steps=2700),
    )


@registry.register("translation.quickstart_dense")
def quickstart_dense() -> Params:
    """The quickstart without experts: a dense model with the same FLOPs per token.

    Purpose: to see what experts gain. The quickstart sends each token to two experts; this model
    has a feed-forward layer of twice the hidden size instead. All else is the same.

    Time: as the quickstart. Result: equal to it within the noise of a run, with half of the text.

        gshard-train --experiment=translation.quickstart_dense --logdir=runs/quickstart_dense
        gshard-evaluate --logdir=runs/quickstart_dense
    """
    params = quickstart()
    for stack in (params.task.encoder, params.task.decoder):
        experts = Top2Router.experts_per_token(stack.moe.router)
        stack.moe = _dense_layer(experts * stack.hidden_dim)
    return params


@registry.register("translation.from_files")
def from_files() -> Params:
    """Your own parallel text: TSV files, Moses pairs or gettext catalogs.

    Purpose: the quickstart's model on any languages and any text. Dev and test are held out of the
    training files unless you give files for them.

    Time: 10 minutes on 2 CPU cores, as the quickstart; set run.steps for more text. Result: depends
    on the text. Below a few thousand pairs per language there is little to learn.

    Tab-separated rows of language, source, target (plain, .gz or .xz; globs work):

        gshard-train --experiment=translation.from_files --logdir=runs/mine \\
            '--input.corpus.train=corpus/*.tsv.gz'

    Moses pairs, here data/train.de and data/train.fr, each with data/train.en:

        gshard-train --experiment=translation.from_files --logdir=runs/mine \\
            --gin_param='input.corpus = @lingvo_gshard.wings.preparation.formats.moses.MosesReader' \\
            --input.corpus.train=data/train --input.corpus.dev=data/dev \\
            --input.corpus.test=data/test

    A tree of gettext catalogs, whose messages are in English:

        gshard-train --experiment=translation.from_files --logdir=runs/mine \\
            --gin_param='input.corpus = @lingvo_gshard.wings.preparation.formats.gettext.GettextReader' \\
            --input.corpus.train=locale/

    The same settings can be lines of a file for --gin_file. input.corpus.on_bad_row = "skip" leaves
    out and counts rows that cannot be read, instead of refusing them.
    """  # noqa: E501
    params = quickstart()
    params.input.set(corpus=TsvReader.params(), languages=())
    params.input.vocabulary.size = 4000
    for stack in (params.task.encoder, params.task.decoder):
        stack.set(input_dropout_rate=0.1, residual_dropout_rate=0.1)
    return params


def _embedded_corpus(languages: tuple[str, ...], temperature: float) -> Params:
    """The embedded corpus. Row lengths follow its ratio of source to target tokens, 1.19."""
    p = TranslationInput.params()
    p.set(languages=languages, temperature=temperature)
    p.set(batch_rows=24, source_length=96, target_length=80)
    p.vocabulary.set(joint=True, size=4000)
    return p


def _task(
    model_dim: int, hidden_dim: int, num_heads: int, num_layers: int, num_experts: int
) -> Params:
    """A Transformer with experts in every other layer and one shared embedding table."""
    stack = TransformerStack.params().set(
        num_layers=num_layers,
        num_heads=num_heads,
        hidden_dim=hidden_dim,
        moe_every=2,
        moe=_experts(num_experts),
        input_dropout_rate=0.05,
        residual_dropout_rate=0.05,
    )
    # Cross-attention needs the position embeddings that the task adds; self-attention learns from
    # distances much faster.
    stack.layer.self_attention.rotary_fraction = 1.0
    return TranslationTask.params().set(
        model_dim=model_dim,
        encoder=stack,
        decoder=stack.copy().set(is_decoder=True),
        share_embeddings=True,
        tie_softmax=True,
        label_smoothing=0.1,
    )


def _dense_layer(hidden_dim: int) -> Params:
    """Returns the Params of a feed-forward layer with an expert's activation and no bias."""
    activation = MixtureOfExperts.params().experts.activation
    return FeedForward.params().set(hidden_dim=hidden_dim, activation=activation, use_bias=False)


def _experts(num_experts: int) -> Params:
    """Top-2 experts. Evaluation drops no token, so no translation depends on its batch."""
    router = Top2Router.params().set(
        mode="paper",
        capacity_factor=1.0,
        evaluation_capacity_factor=float(num_experts),
        second_expert="random",
        auxiliary_loss_weight=0.01 * num_experts**2,
    )
    return MixtureOfExperts.params().set(num_experts=num_experts, group_size=192, router=router)


def _step() -> Params:
    return Trainer.params().set(
        optimizer=OPTIMIZERS["muon"].params().set(iterations=3),
        schedule=Linear.params().set(learning_rate=1e-2, warmup_steps=200),
        clip_norm=1.0,
    )


def _run(steps: int) -> Params:
    return RunOptions.params().set(steps=steps, log_every_steps=50, checkpoint_every_steps=500)
