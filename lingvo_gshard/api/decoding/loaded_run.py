"""LoadedRun: a run whose model is restored when it is first needed, to be decoded with."""

from __future__ import annotations

import functools
from typing import Any

from lingvo_gshard.api.decoding.decoder import Decoder, open_decoder
from lingvo_gshard.api.open_models.published_settings import published_settings
from lingvo_gshard.api.saved_run import SavedRun
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.inference.options import DecodingOptions
from lingvo_gshard.inference.published_settings import PublishedSettings
from lingvo_gshard.inference.translator import Translator
from lingvo_gshard.inference.writer import Writer
from lingvo_gshard.tasks import Task


class LoadedRun(SavedRun):
    """A run with what its checkpoint holds: the model, and what decodes with it."""

    @property
    def step(self) -> int:
        """The step of the restored checkpoint; before that, of the checkpoint to restore."""
        restored = self.__dict__.get("model") or self.__dict__.get("decoder")
        return restored.step if restored else super().step

    @functools.cached_property
    def published_settings(self) -> PublishedSettings:
        """Settings of generation that an imported model was published with; none for other runs."""
        return published_settings(self.logdir, self.params)

    @functools.cached_property
    def decoder(self) -> Decoder:
        """The part that translators and writers of this run share.

        Raises:
          UserError: the run's task decodes nothing.
        """
        return open_decoder(self)

    def translator(self, options: DecodingOptions | None = None) -> Translator:
        """Returns a translator of this model. Programs are compiled when first needed.

        Args:
          options: how to search.

        Raises:
          UserError: the run's task is not translation.
        """
        self.check_decoder(Translator)
        input_: Any = self.decoder.input
        source, target = input_.source_vocabulary, input_.target_vocabulary
        return Translator(self.decoder.engine, source, target, options)

    def writer(self, options: DecodingOptions | None = None) -> Writer:
        """Returns a writer of this model. Programs are compiled when first needed.

        Args:
          options: how to choose tokens; by default they are drawn, with temperature 1.

        Raises:
          UserError: the run's task is not language modeling.
        """
        self.check_decoder(Writer)
        input_: Any = self.decoder.input
        return Writer(self.decoder.engine, input_.vocabulary, options)

    def check_decoder(self, decoder: type[Translator] | type[Writer]) -> None:
        """Raises UserError naming the run's task if it does not decode with a `decoder`."""
        task: type[Task] = self.params.task.cls
        if task.DECODING is None or task.DECODING.has_source != decoder.HAS_SOURCE:
            raise UserError(
                f"`logdir={self._given}`: the run of {self.params.name} has the task "
                f"{task.__name__}, which has no {decoder.__name__}"
            )
