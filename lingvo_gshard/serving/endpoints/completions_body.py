"""The body of a request to /v1/completions, and what it asks of the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.inference import requests as inference
from lingvo_gshard.inference.options import DRAWING, DecodingOptions
from lingvo_gshard.inference.text import stop_check
from lingvo_gshard.serving.bodies import Count, Fraction, Stops, listed, options_error
from lingvo_gshard.serving.errors import RequestError
from lingvo_gshard.serving.model import ServedModel
from lingvo_gshard.serving.service import Limits

# OpenAI's API answers every mistake with this status.
BAD_REQUEST = 400
_MOST_STOPS = 4
# Fields of the API that this server does not have, with the values that ask for nothing.
_ABSENT = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options` of a request."""

    include_usage: bool = False


class CompletionsBody(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of OpenAI's API, and `timeout` in seconds."""

    prompt: str | list[str | Count | list[Count]]
    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stops | None = None
    seed: Count | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    user: str | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    suffix: str | None = None
    timeout: Annotated[float, Meta(gt=0, le=1e6)] | None = None

    def check(self, model: ServedModel, limits: Limits) -> None:
        """Raises RequestError for what this server does not have."""
        if self.model not in (None, model.name):
            raise RequestError(
                404,
                f"the model {self.model!r} is not served; this server has {model.name!r}",
                "model",
                "model_not_found",
            )
        for name, neutral in _ABSENT.items():
            if getattr(self, name) not in neutral:
                raise _bad(name, f"{name} is not supported by this server; leave it out")
        if self.best_of not in (None, self.n or 1):
            raise _bad("best_of", f"best_of is {self.best_of}; only the value of n is supported")
        if (self.n or 1) > limits.beam_size:
            raise _bad("n", f"n is {self.n}; at most {limits.beam_size} was expected")
        if self.logprobs is not None and self.logprobs > self._most_logprobs:
            raise _bad(
                "logprobs",
                f"logprobs is {self.logprobs}; this server has the log-probabilities of the chosen "
                "tokens only: logprobs=0, or 1 with temperature=0",
            )
        if self.echo and self.logprobs is not None:
            raise _bad("logprobs", "logprobs does not go together with echo on this server")
        if len(listed(self.stop or [])) > _MOST_STOPS:
            raise _bad("stop", f"stop has more than {_MOST_STOPS} texts")

    @property
    def _most_logprobs(self) -> int:
        """1 if the chosen token is also the likeliest one, else 0."""
        return int(self.temperature == 0)

    def requests(self, model: ServedModel) -> list[inference.Request]:
        """Returns a request for each prompt. Raises RequestError if one is too long."""
        options, most = self._options(model), model.engine.facts.most_positions
        requests = []
        for number, ids in enumerate(self._prompts(model)):
            given = model.vocabulary.begin(ids)
            count = len(given) - len(model.vocabulary.before)
            if count + options.most_tokens > most:
                raise RequestError(
                    BAD_REQUEST,
                    f"prompt {number} has {count} tokens and max_tokens is "
                    f"{options.most_tokens}; this model has {most} positions for both",
                    "prompt",
                    "context_length_exceeded",
                )
            requests.append(
                inference.Request(
                    given=given,
                    options=options,
                    streams=bool(self.stream),
                    should_stop=stop_check(model.vocabulary, given, options),
                )
            )
        return requests

    def _prompts(self, model: ServedModel) -> list[Sequence[int]]:
        """Returns the tokens of each prompt."""
        if isinstance(self.prompt, str):
            return [model.vocabulary.encode(self.prompt)]
        if not self.prompt:
            raise _bad("prompt", "prompt is an empty list; a text or tokens were expected")
        if all(isinstance(part, int) for part in self.prompt):
            return [self._checked(model, [p for p in self.prompt if isinstance(p, int)])]
        found = []
        for part in self.prompt:
            if isinstance(part, int):
                raise _bad("prompt", "prompt mixes tokens with texts or lists of tokens")
            is_text = isinstance(part, str)
            found.append(model.vocabulary.encode(part) if is_text else self._checked(model, part))
        return found

    @staticmethod
    def _checked(model: ServedModel, ids: list[int]) -> list[int]:
        size = model.vocabulary.size
        wrong = next((token for token in ids if token >= size), None)
        if wrong is not None:
            raise _bad("prompt", f"prompt has the token {wrong}; 0 to {size - 1} was expected")
        return ids

    def _options(self, model: ServedModel) -> DecodingOptions:
        given = {
            "beam_size": 1,
            "most_tokens": self.max_tokens or 16,
            "seed": self.seed or 0,
            "stop": tuple(listed(self.stop or [])),
        }
        for name in ("temperature", "top_p"):
            if getattr(self, name) is not None:
                given[name] = getattr(self, name)
        try:
            options = model.published.options(DRAWING, given)
            return dataclasses.replace(options, best=(self.n or 1) if options.draws else 1)
        except UserError as error:
            raise options_error(error, BAD_REQUEST) from None


def _bad(field: str, message: str) -> RequestError:
    return RequestError(BAD_REQUEST, message, field)
