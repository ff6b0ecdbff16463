"""Runs the models of `gshard-bench decode` on the inference engine."""

from __future__ import annotations

import dataclasses
import time

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding.model_facts import ModelFacts
from lingvo_gshard.decoding.precision import TRAINED
from lingvo_gshard.inference.engine.engine import Engine
from lingvo_gshard.inference.engine.engine_options import EngineOptions
from lingvo_gshard.inference.loading import facts_of, make_engine
from lingvo_gshard.inference.options import DecodingOptions
from lingvo_gshard.inference.requests import Request
from lingvo_gshard.tasks.token_task import TokenTask
from lingvo_gshard.tools.benchmarks.decode.cases import Case
from lingvo_gshard.training.experiments import with_configured_vocabularies


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with weights.

    Attributes:
      task: the model.
      theta: its weights.
      facts: what the host knows of it.
    """

    task: TokenTask
    theta: NestedMap
    facts: ModelFacts

    def engine(self, workers: int, precision: str = TRAINED) -> Engine:
        """Returns an engine.

        Args:
          workers: the number of its threads.
          precision: one of decoding/precision.py.
        """
        options = EngineOptions(workers=workers, exact=True)
        return make_engine(self.task, self.theta, self.facts, options=options, precision=precision)


def initial_model(experiment: Params, positions: int | None = None) -> Model:
    """Returns the model of an experiment with its initial weights.

    Args:
      experiment: Params of a translation or language model.
      positions: positions of a text of a language model; None for those of a training row.

    Raises:
      UserError: the experiment's task decodes nothing.
    """
    task = with_configured_vocabularies(experiment).instantiate()
    facts = facts_of(task, experiment.input, positions)
    theta = task.init(0).transform(lambda weight: weight.numpy())
    return Model(task, theta, facts)


def requests(case: Case, facts: ModelFacts) -> list[Request]:
    """Returns the requests of a case. Every text gets exactly the tokens of its batch."""
    found = []
    for batch in case.batches:
        options = DecodingOptions(
            beam_size=case.beam, most_tokens=batch.tokens, least_tokens=batch.tokens
        )
        for text in batch.texts:
            if facts.has_source:
                request = Request((*text, facts.end_ids[0]), (facts.bos_id,), options)
            else:
                request = Request((), (facts.bos_id, *text), options)
            found.append(request)
    return found


def decode(engine: Engine, case: Case) -> float:
    """Decodes all texts of a case and returns the seconds."""
    asked = requests(case, engine.facts)
    started = time.perf_counter()
    answers = [answer.result() for answer in engine.submit_all(asked)]
    seconds = time.perf_counter() - started
    for request, (best, *_) in zip(asked, answers, strict=True):
        # Both include the end, which the last token may be.
        found, wanted = len(best.log_probabilities), request.options.most_tokens
        assert found == wanted, f"{found} tokens instead of {wanted}"
    return seconds
