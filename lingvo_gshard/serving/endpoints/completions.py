"""POST /v1/completions: continues texts, in the format of OpenAI's API.

https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

import dataclasses
import functools
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.inference import requests as inference
from lingvo_gshard.inference.options import DRAWING, DecodingOptions
from lingvo_gshard.inference.requests import END, STOP, Finished, Hypothesis, NewTokens
from lingvo_gshard.inference.text import GrowingText, echo, stop_check
from lingvo_gshard.serving.admission_queue import Answers
from lingvo_gshard.serving.bodies import Count, Fraction, Stops, listed, options_error, parse
from lingvo_gshard.serving.endpoints.generate import STREAM_HEADERS
from lingvo_gshard.serving.endpoints.state import server_sent
from lingvo_gshard.serving.errors import ClientGoneError, RequestError, json_response
from lingvo_gshard.serving.model import ServedModel
from lingvo_gshard.serving.service import Limits, Service

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


PATH = "/v1/completions"


async def respond(service: Service, request: Request) -> Response:
    """Answers a request. Raises RequestError if it is wrong or cannot be answered."""
    service.check_task("language_model", PATH)
    data = await service.read(request)
    body = parse(data, CompletionsBody, BAD_REQUEST)
    deadline = service.deadline(body.timeout)
    body.check(service.model, service.limits)
    prepare = functools.partial(_Completion, service.model, body)
    completion = await service.prepare(prepare, len(data))
    answers = service.submit(completion.requests, request, BAD_REQUEST)
    if body.stream:
        events = _events(service, completion, answers, deadline)
        return StreamingResponse(events, 200, STREAM_HEADERS, "text/event-stream")
    async with service.until(deadline), answers:
        return json_response(completion.complete(await answers.results()))


class _Completion:
    """The parts of the answer to one request."""

    def __init__(self, model: ServedModel, body: CompletionsBody):
        self._model, self._body = model, body
        self.requests = body.requests(model)
        # Without a temperature all texts of a prompt are equal, so that one is enough.
        self._copies = 1 if self.requests[0].options.draws else body.n or 1
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }

    def complete(self, results: Sequence[Sequence[Hypothesis]]) -> dict:
        """Returns the whole answer as a JSON value."""
        choices = [
            self._choice(request, found)
            for request, hypotheses in zip(self.requests, results, strict=True)
            for found in [*hypotheses] * self._copies
        ]
        for index, choice in enumerate(choices):
            choice["index"] = index
        return {**self._head, "choices": choices, "usage": self.usage(results)}

    def usage(self, results: Sequence[Sequence[Hypothesis]]) -> dict:
        """Returns the numbers of tokens, without those before all texts."""
        before = len(self._model.vocabulary.before)
        given = sum(len(request.given) - before for request in self.requests)
        new = self._copies * sum(
            len(found.log_probabilities) for hypotheses in results for found in hypotheses
        )
        return {"prompt_tokens": given, "completion_tokens": new, "total_tokens": given + new}

    def beginnings(self) -> list[tuple[inference.Request, GrowingText, str]]:
        """Returns (request, growing text, prompt if echoed, else "") for each choice."""
        vocabulary = self._model.vocabulary
        return [
            (
                request,
                self._growing(request),
                echo(vocabulary, request.given) if self._body.echo else "",
            )
            for request in self.requests
            for _ in range(request.options.best * self._copies)
        ]

    def part(
        self,
        index: int,
        text: str,
        reason: str | None = None,
        logprobs: dict | None = None,
    ) -> dict:
        """Returns a part of a streamed answer as a JSON value."""
        choice = {"index": index, "text": text, "finish_reason": reason, "logprobs": logprobs}
        return {**self._head, "choices": [choice]}

    def new_part(self, index: int, growing: GrowingText, new: NewTokens) -> dict | None:
        """Returns the part of a streamed answer for new tokens; None if it has nothing to say.

        Log-probabilities come with their tokens, whose text may come later.
        """
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._logprobs(growing, new.tokens, new.log_probabilities)
        text = growing.add(new.tokens)
        return self.part(index, text, logprobs=logprobs) if text or logprobs else None

    def last_part(self, results: Sequence[Sequence[Hypothesis]]) -> dict | None:
        """Returns the part that counts tokens; None if it was not asked for."""
        wanted = self._body.stream_options
        if not wanted or not wanted.include_usage:
            return None
        return {**self._head, "choices": [], "usage": self.usage(results)}

    def _choice(self, request: inference.Request, found: Hypothesis) -> dict:
        vocabulary = self._model.vocabulary
        growing, logprobs = self._growing(request), None
        tokens = found.tokens if found.end is None else (*found.tokens, found.end)
        if self._body.logprobs is not None:
            logprobs = self._logprobs(growing, tokens, found.log_probabilities)
        text = growing.add(tokens, is_last=True)
        if self._body.echo:
            text = echo(vocabulary, request.given) + text
        reason = finish_reason(found)
        return {"index": 0, "text": text, "finish_reason": reason, "logprobs": logprobs}

    def _growing(self, request: inference.Request) -> GrowingText:
        """Returns a text that continues the prompt of a request."""
        vocabulary, options = self._model.vocabulary, request.options
        return GrowingText(vocabulary, request.given, options.stop, bool(self._body.echo))

    def _logprobs(
        self, growing: GrowingText, tokens: Sequence[int], values: Sequence[float]
    ) -> dict:
        """Returns `logprobs` of the next tokens of a text, including the end of the text."""
        pieces = list(map(self._model.vocabulary.piece, tokens))
        pairs = zip(pieces, values, strict=True)
        is_top = self._body.logprobs == 1
        return {
            "tokens": pieces,
            "token_logprobs": list(values),
            "top_logprobs": [{piece: value} for piece, value in pairs] if is_top else None,
            "text_offset": growing.offsets(tokens),
        }


def finish_reason(found: Hypothesis) -> str:
    """Returns why a text ended, in the API's words."""
    return "stop" if found.reason in (END, STOP) else "length"


async def _events(
    service: Service, completion: _Completion, answers: Answers, deadline: float
) -> AsyncIterator[str]:
    """Yields the server-sent events of a streamed answer."""
    try:
        async with answers:
            async for part in _parts(service, completion, answers, deadline):
                yield server_sent(part)
        yield "data: [DONE]\n\n"
    except RequestError as error:
        service.metrics.errors.labels(PATH, str(error.status)).inc()
        yield server_sent(error.body())
    except ClientGoneError:
        return


async def _parts(
    service: Service, completion: _Completion, answers: Answers, deadline: float
) -> AsyncIterator[dict]:
    """Yields the parts of a streamed answer: new text, the reason of each end, and the usage."""
    choices = completion.beginnings()
    count = len(choices) // len(completion.requests)
    for index, (_, _, prompt) in enumerate(choices):
        if prompt:
            yield completion.part(index, prompt)
    results: dict[int, Sequence[Hypothesis]] = {}
    while len(results) < len(completion.requests):
        async with service.until(deadline):
            number, event = await answers.next()
        first = number * count
        if isinstance(event, NewTokens):
            # Without a temperature, the one text that is decoded stands for all choices.
            own = range(first, first + count)
            draws = completion.requests[number].options.draws
            for index in own[event.text : event.text + 1] if draws else own:
                if part := completion.new_part(index, choices[index][1], event):
                    yield part
        elif isinstance(event, Finished):
            results[number] = event.hypotheses
            for index in range(first, first + count):
                found = event.hypotheses[min(index - first, len(event.hypotheses) - 1)]
                rest = choices[index][1].add((), is_last=True)
                yield completion.part(index, rest, reason=finish_reason(found))
    last = completion.last_part([results[n] for n in range(len(completion.requests))])
    if last:
        yield last
