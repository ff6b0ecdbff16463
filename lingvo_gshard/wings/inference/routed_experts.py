"""RoutedExperts: tells which experts the tokens of a text are routed to, by a pass of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.wings.inference.decoding.state import StateShape
from lingvo_gshard.wings.inference.engine import shapes
from lingvo_gshard.wings.inference.engine.engine import Engine
from lingvo_gshard.wings.inference.model_facts import NO_TOKEN, ModelFacts
from lingvo_gshard.wings.inference.programs.executables import GATES, ProgramKey


@dataclasses.dataclass(frozen=True)
class RoutedExperts:
    """The experts of one layer that computed each token of a text.

    Attributes:
      path: the layer's path. Layers of a compiled loop share one path.
      reads_source: whether the layer computes the tokens of the source and not of the text.
      experts: for each token, (expert, gate) with the largest gate first.
    """

    path: str
    reads_source: bool
    num_experts: int
    experts: list[list[tuple[int, float]]]


def routed_experts(
    engine: Engine, tokens: Sequence[int], source: Sequence[int] = ()
) -> list[RoutedExperts]:
    """Returns the experts that each token of a text, and of its source, is routed to.

    All tokens of the text are known, so one pass through the model is enough. Programs are compiled
    when first needed.

    Args:
      tokens: all tokens of the text, starting with the token before all texts.
      source: all tokens of the source; empty for a model without sources.
    """
    key = routed_experts_program(engine.facts, len(tokens), len(source))
    shape, program = key.shape, engine.executables.get(key)
    assert shape is not None
    sizes = [(tokens, shape.length), (source, shape.memory_length)]
    ids = [_padded(given, size) for given, size in sizes if size]
    gates = program.call(*engine.weights, *ids)
    found = []
    for output, gates_BLE in zip(program.outputs, map(np.asarray, gates), strict=True):
        path = output.path.partition("/")[2]
        reads_source = path.startswith("encoder")
        length = len(source if reads_source else tokens)
        experts = [_experts_of(gates_E) for gates_E in gates_BLE[0, :length]]
        found.append(RoutedExperts(path, reads_source, gates_BLE.shape[-1], experts))
    return found


def routed_experts_program(facts: ModelFacts, tokens: int, source: int) -> ProgramKey:
    """Returns the key of the program that `routed_experts` runs."""
    length = shapes.fitting(shapes.LENGTHS, tokens)
    memory = shapes.fitting(shapes.LENGTHS, source, facts.most_source) if source else 0
    return ProgramKey(GATES, shape=StateShape(1, length, memory))


def _padded(ids: Sequence[int], size: int) -> np.ndarray:
    row = np.full((1, size), NO_TOKEN, np.int32)
    row[0, : len(ids)] = ids
    return row


def _experts_of(gates_E: np.ndarray) -> list[tuple[int, float]]:
    order = np.argsort(-gates_E, kind="stable")
    return [(int(expert), float(gates_E[expert])) for expert in order if gates_E[expert] > 0]
