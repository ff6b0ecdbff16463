"""Compiles what most requests need, before the server accepts any."""

from __future__ import annotations

from collections.abc import Callable

from lingvo_gshard.inference.expert_visits import expert_visits
from lingvo_gshard.inference.options import DRAWING, DecodingOptions
from lingvo_gshard.inference.requests import Request
from lingvo_gshard.serving.model import ServedModel

# Tokens of most sources and texts.
_LENGTHS = (32, 64)


def warm_up(model: ServedModel, beam_size: int, say: Callable[[str], None]) -> None:
    """Compiles the programs for short texts, one by one and many at once.

    Args:
      model: the model.
      beam_size: the beam that most requests to a translation model will ask for.
      say: shows a line.
    """
    engine, facts = model.engine, model.engine.facts
    options = (
        model.published.options(DecodingOptions(beam_size=beam_size), {})
        if facts.has_source
        else model.published.options(DRAWING, {"most_tokens": 4, "least_tokens": 0})
    )
    engine.warm_up(options, _LENGTHS)
    sources = model.source_vocabulary
    source = (sources.unk_id, sources.eos_id) if sources else ()
    # A language model computes given tokens, for which it has programs of their own.
    given = (facts.bos_id,) if source else (facts.bos_id, model.vocabulary.unk_id)
    engine.submit(Request(source=source, given=given, options=options)).result()
    expert_visits(engine, given, source)
    say(f"{engine.executables.count} programs are ready after {engine.executables.seconds:.0f} s")
