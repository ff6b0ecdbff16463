"""An experiment in translation from all languages of the embedded corpus."""

from __future__ import annotations

from lingvo_gshard.core import Params, registry
from lingvo_gshard.params import translation
from lingvo_gshard.training.step.schedules import WarmupStableDecay
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.published_layers.routers import HashRouter


@registry.register("translation.hundred_languages")
def hundred_languages() -> Params:
    """All 99 languages of the corpus to English (under an hour on 2 cores).

    Purpose: massively multilingual translation as in the GShard paper (arXiv 2006.16668), at the
    size of one machine. As in the paper, source and target have separate vocabularies. The source
    vocabulary has enough pieces for the words of 99 languages. The corpus is unbalanced, with 15
    thousand to about 50 pairs per language; languages are sampled with temperature 1.25 (arXiv
    1907.05019). The corpus has few targets: 15 thousand English sentences that most languages
    share. So only the encoder has experts, chosen by a hash of the token. The decoder is small and
    has dropout, also of whole tokens. The learning rate decays late, and the best checkpoint by dev
    loss counts.

    Time: 49 minutes of one CPU core. Result: chrF 39 and BLEU 17, averaged over the 58 languages
    with 20 test rows or more; docs/results.md has the table by language.

        gshard-train --experiment=translation.hundred_languages --logdir=runs/hundred
        gshard-evaluate --logdir=runs/hundred
    """
    params = translation.quickstart()
    params.input.set(languages=(), temperature=1.25)
    params.input.vocabulary.set(joint=False, size=48000, target_size=4000)
    task = params.task
    task.share_embeddings = False
    router, dispatch = HashRouter.params().set(k=2), DroplessDispatch.params()
    task.encoder.moe.set(num_experts=32, router=router, dispatch=dispatch)
    task.decoder.moe = translation.quickstart_dense().task.decoder.moe
    task.decoder.set(token_dropout_rate=0.3, residual_dropout_rate=0.2)
    params.step.schedule = WarmupStableDecay.params().set(
        learning_rate=4e-3, warmup_steps=200, decay_share=0.3
    )
    params.run.set(steps=10_000, evaluate_every_steps=500, keep_best="dev/loss")
    return params
