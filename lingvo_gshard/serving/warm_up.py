"""Compiles what most requests need, before the server accepts any."""

from __future__ import annotations

from collections.abc import Callable

from lingvo_gshard.inference.expert_visits import expert_visits
from lingvo_gshard.inference.options import DecodingOptions
from lingvo_gshard.inference.requests import Request
from lingvo_gshard.serving.model import ServedModel

# Texts that arrive together, so that small and large batches are compiled.
_TOGETHER = (1, 4, 48)
_SOURCE_TOKENS, _NEW_TOKENS = 12, 24


def warm_up(model: ServedModel, beam_size: int, say: Callable[[str], None]) -> None:
    """Decodes short texts one by one and many at once, so that their programs are compiled.

    Args:
      model: the model.
      beam_size: the beam that most requests will ask for.
      say: shows a line.
    """
    engine = model.engine
    draws = not engine.facts.has_source
    options = DecodingOptions(
        beam_size=1 if draws else beam_size,
        temperature=1.0 if draws else 0.0,
        most_tokens=_NEW_TOKENS,
    )
    token = model.vocabulary.unk_id
    source = (token,) * _SOURCE_TOKENS + (engine.facts.eos_id,) if engine.facts.has_source else ()
    given = (engine.facts.bos_id,) if source else (engine.facts.bos_id, token, token)
    request = Request(source=source, given=given, options=options)
    for count in _TOGETHER:
        for answer in engine.submit_all([request] * count):
            answer.result()
    expert_visits(engine, given, source)
    say(f"Compiled {engine.executables.count} programs in {engine.executables.seconds:.0f} s")
