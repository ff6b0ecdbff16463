"""ServedModel: a trained model with all that answers need."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from lingvo_gshard.api.run import Run
from lingvo_gshard.core.config.listed import listed
from lingvo_gshard.data.vocabulary import Vocabulary
from lingvo_gshard.inference.engine.engine import Engine
from lingvo_gshard.inference.published_settings import PublishedSettings
from lingvo_gshard.inference.translator import Translator


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A trained model.

    Attributes:
      name: what requests call it.
      step: training step of its checkpoint.
      engine: decodes with it.
      vocabulary: of the texts that it writes.
      translator: encodes sentences and decodes translations; None for a language model.
      source_vocabulary: of the sentences that it translates; None for a language model.
      languages: source languages that it was trained on; empty if unknown.
      published: how it was published to be decoded.
      created: when it was loaded, in seconds since 1970.
    """

    name: str
    step: int
    engine: Engine
    vocabulary: Vocabulary
    translator: Translator | None = None
    source_vocabulary: Vocabulary | None = None
    languages: tuple[str, ...] = ()
    published: PublishedSettings = dataclasses.field(default_factory=PublishedSettings)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @classmethod
    def of_run(cls, run: Run) -> ServedModel:
        """Returns the newest checkpoint of a run, loaded now.

        Raises:
          UserError: the run's task decodes nothing, or no checkpoint can be read.
        """
        decoder, name = run.decoder, run.params.name
        engine: Engine = decoder.engine
        input_: Any = decoder.input
        if not engine.facts.has_source:
            return cls(
                name, decoder.step, engine, input_.vocabulary, published=run.published_settings
            )
        languages = listed(input_.p.get("languages")) if "languages" in input_.p else ()
        return cls(
            name,
            decoder.step,
            engine,
            input_.target_vocabulary,
            run.translator(),
            input_.source_vocabulary,
            languages,
            run.published_settings,
        )

    @property
    def task(self) -> str:
        """The kind of the model, in a word for programs."""
        return "translation" if self.translator else "language_model"
