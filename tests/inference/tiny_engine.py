"""Engines of tiny models, and plain searches to compare them with."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.tasks.language_model import LanguageModelTask
from lingvo_gshard.tasks.token_task import TokenTask
from lingvo_gshard.wings.inference.decoding.models import model_facts
from lingvo_gshard.wings.inference.engine.engine import Engine
from lingvo_gshard.wings.inference.engine.shapes import EngineOptions
from lingvo_gshard.wings.inference.loading import make_engine
from tests.inference.decoding import tiny_model

BOS, EOS = tiny_model.BOS, tiny_model.EOS
V = 13


@dataclasses.dataclass(frozen=True)
class Model:
    """A tiny model with its weights.

    Attributes:
      task: the model.
      theta: its weights.
    """

    task: TokenTask
    theta: NestedMap

    def engine(self, **options: int | bool) -> Engine:
        """Returns an engine of the model."""
        facts = dataclasses.replace(model_facts(self.task, 64, BOS, (EOS,)), most_steps=5)
        return make_engine(self.task, self.theta, facts, options=EngineOptions(**options))

    def log_probabilities(self, source, texts) -> np.ndarray:
        """Returns log-probabilities [text, V] of the next token of texts of the same length.

        Args:
          source: ids of the source; empty for a language model.
          texts: the ids of each text, those before the first token included.
        """
        inputs = np.array(texts, np.int32)
        batch = _packed("target", inputs) | {"target_inputs": inputs}
        if source:
            ids = np.repeat([source], len(inputs), axis=0).astype(np.int32)
            batch |= _packed("source", ids) | {"source_ids": ids}
        batch = {name: tf.convert_to_tensor(value) for name, value in batch.items()}
        with context.scope(training=False):
            logits = self.task.logits(self.theta, batch)
        return tf.nn.log_softmax(logits[:, -1]).numpy()


def _packed(side: str, ids: np.ndarray) -> dict[str, np.ndarray]:
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape).astype(np.int32)
    return {f"{side}_segments": np.ones_like(ids), f"{side}_positions": positions}


def translation_model(seed: int = 1) -> Model:
    """Returns a model of 2 layers, whose last ones have experts."""
    task = tiny_model.task(vocabulary_size=V)
    return Model(task, tiny_model.theta(task, seed, scale=2.0))


def language_model(**values: object) -> Model:
    """Returns a language model of 2 layers, with these Params."""
    params = LanguageModelTask.params().set(vocabulary_size=V, model_dim=8)
    params.decoder.set(num_layers=2, num_heads=2, hidden_dim=16, moe_every=2)
    params.decoder.moe.set(num_experts=4, group_size=16)
    params.decoder.moe.router.evaluation_capacity_factor = 4.0
    for name, value in values.items():
        params.set_path(name.replace("__", "."), value)
    task = params.instantiate()
    return Model(task, task.init(3).transform(lambda weight: weight * 3.0))


def plain_greedy(model, source, given, limit, allowed=None):
    """Returns the tokens, the end included, and their log-probabilities."""
    tokens, gains = [], []
    while len(tokens) < limit and (not tokens or tokens[-1] != EOS):
        (row,) = model.log_probabilities(source, [[*given, *tokens]])
        choosable = row if allowed is None else np.where(allowed, row, -np.inf)
        tokens.append(int(np.argmax(choosable)))
        gains.append(float(row[tokens[-1]]))
    return tokens, gains


def plain_beam(model, source, given, limit, beam_size):
    """Returns (tokens, log-probabilities) of all ended hypotheses.

    It searches until every hypothesis has the largest length, without stopping early.
    """
    beam, ended = [((), ())], []
    for length in range(1, limit + 1):
        rows = model.log_probabilities(source, [[*given, *tokens] for tokens, _ in beam])
        grown = [
            ((*tokens, token), (*gains, float(row[token])))
            for (tokens, gains), row in zip(beam, rows, strict=True)
            for token in range(V)
        ]
        grown.sort(key=lambda hypothesis: -sum(hypothesis[1]))
        ended += [h for h in grown[:beam_size] if h[0][-1] == EOS]
        beam = [h for h in grown if h[0][-1] != EOS][:beam_size]
        if length == limit:
            ended += beam
    return ended


def ranked(hypotheses, length_exponent: float):
    """Returns (rank, tokens, log-probabilities) of hypotheses, the best first."""
    entries = [
        (sum(gains) / ((5 + len(tokens)) / 6) ** length_exponent, tokens, gains)
        for tokens, gains in hypotheses
    ]
    return sorted(entries, key=lambda entry: -entry[0])
