"""Decodes with a small language model, step by step and by whole passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from lingvo_gshard.core import context
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.inference.engine.shapes import EngineOptions
from lingvo_gshard.inference.loading import make_engine
from lingvo_gshard.inference.options import DecodingOptions
from lingvo_gshard.inference.requests import Request
from lingvo_gshard.tasks.language_model import LanguageModelTask

_BOS, _EOS, _V, _TOKENS = 1, 2, 11, 5
_BEGINNINGS = ((_BOS, 5, 7, 4), (_BOS,))


def greedy_texts(feed_forward: Params) -> Iterator[tuple[str, list[int], list[int]]]:
    """Yields, for some beginnings, what the engine decodes and what whole passes choose.

    Args:
      feed_forward: the layer in each of two layers of a decoder.

    Yields:
      The beginning in words, the tokens of the engine, and the tokens with the largest logits of
      passes over the whole text; both without an end.
    """
    params = LanguageModelTask.params().set(vocabulary_size=_V, model_dim=feed_forward.model_dim)
    params.decoder.set(num_layers=2, num_heads=2, hidden_dim=16, moe_every=0)
    params.decoder.layer.feed_forward = feed_forward
    task = params.instantiate()
    theta = task.init(3).transform(lambda weight: weight * 3.0)
    facts = dataclasses.replace(task.model_facts(32, _BOS, (_EOS,)), most_steps=_TOKENS)
    options = DecodingOptions(beam_size=1, most_tokens=_TOKENS)
    with make_engine(task, theta, facts, options=EngineOptions(workers=1)) as engine:
        for beginning in _BEGINNINGS:
            (found,) = engine.submit(Request((), beginning, options)).result()
            expected: list[int] = []
            while len(expected) < _TOKENS and (not expected or expected[-1] != _EOS):
                ids = np.array([[*beginning, *expected]], np.int32)
                batch = {
                    "target_inputs": tf.constant(ids),
                    "target_segments": tf.ones(ids.shape, tf.int32),
                    "target_positions": tf.range(ids.shape[1], dtype=tf.int32)[tf.newaxis],
                }
                with context.scope(training=False):
                    logits = task.logits(theta, batch)
                expected.append(int(np.argmax(logits[0, -1])))
            without_end = [token for token in expected if token != _EOS]
            yield f"after {list(beginning)}", list(found.tokens), without_end
