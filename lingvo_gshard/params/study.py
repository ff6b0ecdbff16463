"""Experiments of `python -m studies experts`, which shows what experts are worth."""

from __future__ import annotations

from lingvo_gshard.core.config import registry
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.layers.moe import DroplessDispatch, HashRouter, MixtureOfExperts
from lingvo_gshard.params import translation
from lingvo_gshard.training.step.schedules import Linear

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
    return _with_experts(8)


@registry.register("study.experts_32")
def experts_32() -> Params:
    """32 experts in each layer of the decoder, two for each token.

    Purpose: what experts gain at equal FLOPs per token; study.experts_8 says more.

        python -m studies experts --folder=runs/study --models=study.experts_32
    """
    return _with_experts(32)


@registry.register("study.experts_128")
def experts_128() -> Params:
    """128 experts in each layer of the decoder, two for each token.

    Purpose: what experts gain at equal FLOPs per token; study.experts_8 says more.

        python -m studies experts --folder=runs/study --models=study.experts_128
    """
    return _with_experts(128)


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


def _with_experts(num_experts: int) -> Params:
    return _experiment(
        MixtureOfExperts.params().set(
            num_experts=num_experts,
            router=HashRouter.params().set(k=_EXPERTS_PER_TOKEN),
            dispatch=DroplessDispatch.params(),
        )
    )


def _experiment(layer: Params) -> Params:
    """Returns the experiment of a model that translates English into many languages.

    Args:
      layer: takes the place of the feed-forward layers of the decoder.
    """
    params = translation.large()
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


def _dense_layer() -> Params:
    """Returns a feed-forward layer with the FLOPs of a token's experts."""
    hidden_dim = _EXPERTS_PER_TOKEN * _HIDDEN_DIM
    return FeedForward.params().set(hidden_dim=hidden_dim, activation="relu", use_bias=False)
