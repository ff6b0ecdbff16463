"""Experiments of `python -m studies`, which shows what experts are worth."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from lingvo_gshard.core import Experiment, Params, registry
from lingvo_gshard.layers import FeedForward, MixtureOfExperts, RMSNorm, TransformerStack
from lingvo_gshard.tasks import LanguageModelTask
from lingvo_gshard.training import Adam, Linear, RunOptions, Trainer
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.giants import prepared_translation
from lingvo_gshard.wings.preparation.prepared.language_model_input import PreparedLanguageModelInput
from lingvo_gshard.wings.published_layers.routers import HashRouter

_EXPERTS_PER_TOKEN = 2
_HIDDEN_DIM = 256


@registry.register("study.dense")
def dense() -> Params:
    """A dense model, the baseline for the models with experts.

    Purpose: to see what the same FLOPs per token reach with few weights. study.experts_8 sends each
    token to two experts. This model has one feed-forward layer of twice the hidden size instead,
    and equals study.experts_8 otherwise. Data: English to 244 languages, prepared as
    docs/experts.md says.

        python -m studies experts --folder=runs/study --models=study.dense
    """
    return _experiment(_dense_layer())


@registry.register("study.experts_8")
def experts_8() -> Params:
    """Eight experts in each layer of the decoder, two for each token.

    Purpose: what experts gain at equal FLOPs per token. A hash of a token gives its experts,
    and no token is dropped.

        python -m studies experts --folder=runs/study --models=study.experts_8
    """
    return _experiment(_experts(8))


@registry.register("study.bilingual")
def bilingual() -> Params:
    """The dense model for one language, which has as little text as that language.

    Purpose: what a language gains from the text of the others. The best checkpoint by dev loss
    counts, and training ends when four evaluations were not better, since little text is soon
    learned by heart.

        python -m studies experts --folder=runs/study --bilingual=it,sw
    """
    params = dense()
    params.run.set(keep_best="dev/loss", evaluate_every_steps=250, patience=4)
    return params


@registry.register("study.text_dense")
def text_dense() -> Params:
    """A dense language model, the baseline for those with experts.

    Purpose: to see what the same FLOPs per token reach with few weights on text whose sentences are
    not repeated. study.text_experts_8 sends each token to two experts; this model has one
    feed-forward layer of twice the hidden size instead. Data: documentation in English, which
    studies/texts/fetch_documentation.sh fetches and docs/experts.md prepares.

        python -m studies texts --folder=runs/texts --models=study.text_dense
    """
    return _text_experiment(_dense_layer())


@registry.register("study.text_experts_8")
def text_experts_8() -> Params:
    """Eight experts in each layer of a language model, two for each token.

    Purpose: what experts gain at equal FLOPs per token. A hash of a token gives its experts,
    and no token is dropped.

        python -m studies texts --folder=runs/texts --models=study.text_experts_8
    """
    return _text_experiment(_experts(8))


def _experts(num_experts: int) -> Params:
    return MixtureOfExperts.params().set(
        num_experts=num_experts,
        router=HashRouter.params().set(k=_EXPERTS_PER_TOKEN),
        dispatch=DroplessDispatch.params(),
    )


def _experiment(layer: Params) -> Params:
    """Returns translation from English, with `layer` as the feed-forward layers of the decoder."""
    params = prepared_translation.large()
    params.input.set(
        directory="prepared/from_english",
        batch_rows=20,
        source_length=72,
        target_length=128,
        source_vocabulary_size=8000,
    )
    task = params.task.set(model_dim=64)
    task.encoder.set(hidden_dim=_HIDDEN_DIM, num_heads=2, moe_every=1, moe=_dense_layer())
    task.decoder.set(hidden_dim=_HIDDEN_DIM, num_heads=2, moe_every=1, moe=layer)
    params.step.set(schedule=Linear.params().set(learning_rate=4e-3, warmup_steps=200))
    params.run.set(steps=4000, checkpoint_every_steps=500, evaluate_every_steps=0, keep_best="")
    return params


def _text_experiment(layer: Params) -> Params:
    """Returns a model of English text, with `layer` as its feed-forward layers."""
    decoder = TransformerStack.params().set(
        is_causal=True,
        num_layers=4,
        num_heads=2,
        hidden_dim=_HIDDEN_DIM,
        moe_every=1,
        moe=layer,
    )
    decoder.layer.norm = RMSNorm.params()
    decoder.layer.self_attention.rotary_fraction = 1.0
    return Experiment.params().set(
        input=PreparedLanguageModelInput.params().set(
            directory="prepared/documentation", batch_rows=32, length=128, vocabulary_size=8000
        ),
        task=LanguageModelTask.params().set(model_dim=64, decoder=decoder, add_positions=False),
        step=Trainer.params().set(
            optimizer=Adam.params().set(beta1=0.9, beta2=0.98, weight_decay=0.0),
            schedule=Linear.params().set(learning_rate=4e-3, warmup_steps=200),
            clip_norm=1.0,
        ),
        run=RunOptions.params().set(
            steps=4000, log_every_steps=50, checkpoint_every_steps=500, evaluate_every_steps=0
        ),
    )


def _dense_layer() -> Params:
    """Returns a feed-forward layer with the FLOPs of a token's experts."""
    hidden_dim = _EXPERTS_PER_TOKEN * _HIDDEN_DIM
    return FeedForward.params().set(hidden_dim=hidden_dim, activation="relu", use_bias=False)


def _register_more_experts(
    smallest: Callable[[], Params], make: Callable[[Params], Params]
) -> None:
    """Registers experiments that differ from one with 8 experts in their number alone."""
    text = inspect.getdoc(smallest) or ""
    for number in (32, 128):

        def experiment(number: int = number) -> Params:
            return make(_experts(number))

        experiment.__doc__ = text.replace("Eight", str(number)).replace("_8", f"_{number}")
        name = smallest.__name__.replace("_8", f"_{number}")
        registry.register(f"study.{name}")(experiment)


_register_more_experts(experts_8, _experiment)
_register_more_experts(text_experts_8, _text_experiment)
