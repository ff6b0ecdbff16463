"""Experiments in translation that read prepared data."""

from __future__ import annotations

from lingvo_gshard.core import Params, registry
from lingvo_gshard.params import translation
from lingvo_gshard.training.step.schedules import WarmupStableDecay
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.preparation.prepared.translation_input import PreparedTranslationInput

_EXPERTS = 16


@registry.register("translation.large")
def large() -> Params:
    """Prepared data: 1.8 million pairs of 244 languages to English.

    Purpose: to train on what gshard-prepare has written, of any size. Records are read from disk as
    they are needed, so the memory does not grow with the text. docs/data.md says how to fetch and
    prepare the text; your own, prepared, takes its place. Languages are unbalanced, with 160
    thousand to 500 pairs each, and are sampled with temperature 2. Rows have the data's ratio of
    source to target tokens.

    Time: 49 minutes of processor time. Result: a third of an epoch, test perplexity 50, and chrF 24
    and BLEU 6 averaged over the 80 languages with 20 test rows or more; docs/results.md has the
    table by language. The dev loss still falls, so a larger run.steps is worth its time.

        gshard-train --experiment=translation.large --logdir=runs/large
        gshard-evaluate --logdir=runs/large
    """
    params = translation.quickstart()
    params.input = PreparedTranslationInput.params().set(
        directory="prepared/large",
        batch_rows=32,
        source_length=128,
        target_length=64,
        source_vocabulary_size=16000,
        target_vocabulary_size=8000,
    )
    params.input.mixing.temperature = 2.0
    params.task.set(model_dim=192, share_embeddings=False)
    for stack in (params.task.encoder, params.task.decoder):
        stack.set(hidden_dim=768, num_heads=6)
        stack.moe.set(num_experts=_EXPERTS, dispatch=DroplessDispatch.params())
        stack.moe.router.set(
            second_expert="all",
            capacity_factor=0.0,
            evaluation_capacity_factor=0.0,
            auxiliary_loss_weight=0.01 * _EXPERTS**2,
        )
    params.step.schedule = WarmupStableDecay.params().set(learning_rate=2e-3, warmup_steps=500)
    params.run.set(steps=4_000, evaluate_every_steps=500, keep_best="dev/loss")
    return params
