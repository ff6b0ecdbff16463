"""Answers' part on experts: which ones each token of a text, and of its source, visits."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.inference.expert_visits import LayerVisits, expert_visits, visits_program
from lingvo_gshard.inference.programs.program_key import ProgramKey
from lingvo_gshard.inference.requests import Hypothesis, Request
from lingvo_gshard.serving.model import ServedModel


def program(model: ServedModel, request: Request, hypothesis: Hypothesis) -> ProgramKey:
    """Returns the program that `describe` runs."""
    count = len(request.given) + len(hypothesis.tokens)
    return visits_program(model.engine.facts, count, len(request.source))


def describe(model: ServedModel, request: Request, hypothesis: Hypothesis) -> dict:
    """Returns as a JSON value which experts the tokens of a text visited.

    Args:
      model: the model.
      request: what was asked.
      hypothesis: a text that answers it.

    Returns:
      `layers` with path, stack and number of experts, and lists of tokens, each with `text` and
      `experts`: for each layer of the token's stack a list of [expert, gate]. `source` has the
      source's tokens, `given` those given before the text, and `tokens` the new ones.
    """
    given = len(request.given)
    layers = expert_visits(model.engine, [*request.given, *hypothesis.tokens], request.source)
    encoder = [layer for layer in layers if layer.reads_source]
    decoder = [layer for layer in layers if not layer.reads_source]
    source, new = model.source_vocabulary, model.vocabulary
    return {
        "layers": [
            {
                "path": layer.path,
                "stack": "encoder" if layer.reads_source else "decoder",
                "num_experts": layer.num_experts,
            }
            for layer in layers
        ],
        "source": _tokens([source.piece(i) for i in request.source], encoder) if source else [],
        "given": _tokens([new.piece(i) for i in request.given], decoder),
        "tokens": _tokens([new.piece(i) for i in hypothesis.tokens], decoder, given),
    }


def _tokens(pieces: Sequence[str], layers: Sequence[LayerVisits], first: int = 0) -> list[dict]:
    """Returns tokens with their experts; `first` is the position of the first one."""
    return [
        {"text": piece, "experts": [layer.experts[first + index] for layer in layers]}
        for index, piece in enumerate(pieces)
    ]
