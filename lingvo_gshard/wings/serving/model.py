"""ServedModel: a trained model with all that answers need."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

from lingvo_gshard.api.run import Run
from lingvo_gshard.core import UserError, names
from lingvo_gshard.data import Vocabulary
from lingvo_gshard.training import BEST, Logdir, preferred
from lingvo_gshard.wings.fine_tuning.conversations.chat_template import ChatTemplate
from lingvo_gshard.wings.fine_tuning.conversations.conversation_input import chat_template_of
from lingvo_gshard.wings.fine_tuning.conversations.example_prompts import example_prompts_of
from lingvo_gshard.wings.inference.engine.engine import Engine
from lingvo_gshard.wings.inference.options import DRAWING, DecodingOptions
from lingvo_gshard.wings.inference.published_settings import PublishedSettings
from lingvo_gshard.wings.inference.requests import Request
from lingvo_gshard.wings.inference.routed_experts import routed_experts
from lingvo_gshard.wings.inference.translator import Translator
from lingvo_gshard.wings.serving.errors import RequestError

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A trained model.

    Attributes:
      vocabulary: vocabulary of the texts that the model writes.
      translator: encodes sentences and decodes translations; None for a language model.
      source_vocabulary: vocabulary of the sentences to translate; None for a language model.
      languages: source languages that the model was trained on; empty if unknown.
      published: settings of generation that the model was published with.
      template: writes conversations; None if the model has no chat template.
      examples: messages to try with a chat model; empty if it names none.
      created: time when the model was loaded, in seconds since 1970.
    """

    name: str
    step: int
    engine: Engine
    vocabulary: Vocabulary
    translator: Translator | None = None
    source_vocabulary: Vocabulary | None = None
    languages: tuple[str, ...] = ()
    published: PublishedSettings = dataclasses.field(default_factory=PublishedSettings)
    template: ChatTemplate | None = None
    examples: tuple[str, ...] = ()
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
        made: dict[str, Any] = {"published": run.published_settings}
        if engine.facts.has_source:
            made["vocabulary"] = input_.target_vocabulary
            made["source_vocabulary"] = input_.source_vocabulary
            made["translator"] = run.translator()
            if "languages" in input_.p:
                made["languages"] = names.listed(input_.p.get("languages"))
        else:
            made |= {"vocabulary": input_.vocabulary, "template": _template_of(input_)}
            made["examples"] = example_prompts_of(input_) if made["template"] else ()
        return cls(name, decoder.step, engine, **made)

    def check_name(self, name: str | None) -> None:
        """Raises RequestError if a request names another model than this one."""
        if name not in (None, self.name):
            raise RequestError(
                404,
                f"the model {name!r} is not served; this server has {self.name!r}",
                "model",
                "model_not_found",
            )

    @property
    def task(self) -> str:
        """The kind of the model, in a word for programs."""
        return "translation" if self.translator else "language_model"


def _template_of(input_: Any) -> ChatTemplate | None:
    """Returns the chat template of a language model's input; None without any.

    A template that cannot be read is reported in the log: the model can do without it.
    """
    try:
        return chat_template_of(input_)
    except UserError as error:
        _log.warning("There will be no conversations: %s", error)
        return None


# Most sources and texts have at most this many tokens: their programs are compiled first.
_LENGTHS = (32, 64)


def warm_up(model: ServedModel, beam_size: int, say: Callable[[str], None]) -> None:
    """Compiles the programs for short texts, one by one and many at once."""
    engine, facts = model.engine, model.engine.facts
    options = (
        model.published.options(DecodingOptions(beam_size=beam_size), {})
        if facts.has_source
        else model.published.options(DRAWING, {"most_tokens": 4, "least_tokens": 0})
    )
    engine.warm_up(options, _LENGTHS)
    sources = model.source_vocabulary
    source = (sources.unk_id, sources.eos_id) if sources else ()
    # A language model has programs of their own for given tokens; a request with two tokens makes
    # the engine compile these programs, too.
    given = (facts.bos_id,) if source else (facts.bos_id, model.vocabulary.unk_id)
    engine.submit(Request(source=source, given=given, options=options)).result()
    routed_experts(engine, given, source)
    say(f"{engine.executables.count} programs are ready after {engine.executables.seconds:.0f} s")


UNCHANGED = "unchanged"


class DirectoryWatch:
    """Compares a run's directory with what it was when its model was loaded."""

    def __init__(self, logdir: Logdir, step: int, choice: str | int = BEST):
        self._logdir, self._step, self._choice = logdir, step, choice
        self._identity = self._logdir.identity()
        self._last = UNCHANGED

    def state(self) -> str:
        """Returns UNCHANGED, or in words what happened; logs a warning when that changes."""
        found = self._look()
        if found != self._last and found != UNCHANGED:
            _log.warning(
                f"{self._logdir.place}: {found}. The server goes on with the model of step "
                f"{self._step:,}; restart it to load another one"
            )
        self._last = found
        return found

    def _look(self) -> str:
        identity = self._logdir.identity()
        if identity is None:
            return "removed"
        if identity != self._identity:
            return "replaced"
        newer = self._newer()
        return UNCHANGED if newer is None else f"has a newer checkpoint, of step {newer}"

    def _newer(self) -> int | None:
        """Returns the step of the checkpoint to load now, if it is of a later step."""
        try:
            first = preferred(self._logdir.checkpoints, self._choice)[:1]
        except (UserError, OSError):  # The chosen one was deleted, or a bucket is in trouble.
            return None
        return first[0] if first and first[0] > self._step else None
