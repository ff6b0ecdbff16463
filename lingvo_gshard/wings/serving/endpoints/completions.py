"""POST /v1/completions: continues texts, in the format of OpenAI's API.

https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

import dataclasses
import functools
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from lingvo_gshard.core import UserError, listed
from lingvo_gshard.data import Vocabulary
from lingvo_gshard.wings.inference import requests as inference
from lingvo_gshard.wings.inference.options import DRAWING, DecodingOptions
from lingvo_gshard.wings.inference.scoring import TokenScores
from lingvo_gshard.wings.inference.text import GrowingText, echo, stop_check
from lingvo_gshard.wings.serving.admission_queue import Answers
from lingvo_gshard.wings.serving.bodies import Count, Fraction, Stops, options_error, parse
from lingvo_gshard.wings.serving.endpoints.events import server_sent, stream
from lingvo_gshard.wings.serving.endpoints.state import seed_json
from lingvo_gshard.wings.serving.errors import RequestError, json_response
from lingvo_gshard.wings.serving.limits import Limits
from lingvo_gshard.wings.serving.model import ServedModel
from lingvo_gshard.wings.serving.service import Service

# OpenAI's API answers every mistake with this status.
BAD_REQUEST = 400
_MOST_STOPS = 4
_USUAL_TOKENS = 16


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options` of a request."""

    include_usage: bool = False


class BaseBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that requests of OpenAI's API share, and `timeout`."""

    # Fields of the API that this server does not have, with the values that ask for nothing.
    ABSENT: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "presence_penalty": (None, 0),
        "frequency_penalty": (None, 0),
        "logit_bias": (None, {}),
    }

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stops | None = None
    seed: Count | None = None
    user: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    timeout: Annotated[float, Meta(gt=0, le=1e6)] | None = None

    def check(self, model: ServedModel, limits: Limits) -> None:
        """Raises RequestError for what this server does not have."""
        model.check_name(self.model)
        for name, neutral in self.ABSENT.items():
            if getattr(self, name) not in neutral:
                raise bad(name, f"{name} is not supported by this server; leave it out")
        if (self.n or 1) > limits.most_beam_size:
            raise bad("n", f"n is {self.n}; at most {limits.most_beam_size} was expected")
        if len(listed(self.stop or ())) > _MOST_STOPS:
            raise bad("stop", f"stop has more than {_MOST_STOPS} texts")


class CompletionsBody(BaseBody, kw_only=True):
    """The fields of OpenAI's API, and `timeout` in seconds."""

    ABSENT = {**BaseBody.ABSENT, "suffix": (None, "")}  # noqa: RUF012

    prompt: str | list[str | Count | list[Count]]
    max_tokens: Count | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    suffix: str | None = None

    def check(self, model: ServedModel, limits: Limits) -> None:
        super().check(model, limits)
        if self.max_tokens == 0 and not self.echo:
            raise bad("max_tokens", "max_tokens is 0; 1 or more was expected, or echo")
        if self.best_of not in (None, self.n or 1):
            raise bad("best_of", f"best_of is {self.best_of}; only the value of n is supported")
        # The chosen token is also the likeliest one, or only given ones count.
        most = int(self.temperature == 0 or self.max_tokens == 0)
        if (self.logprobs or 0) > most:
            raise bad(
                "logprobs",
                f"logprobs is {self.logprobs}; this server has the log-probabilities of the chosen "
                "tokens only: logprobs=0, or 1 with temperature=0",
            )

    def requests(self, model: ServedModel) -> tuple[list[inference.Request], list[int]]:
        """Returns a request for each prompt and the tokens added before it; refuses long ones."""
        new = _USUAL_TOKENS if self.max_tokens is None else self.max_tokens
        options = decoding_options(model, self, max(new, 1))
        most = model.engine.facts.most_positions
        requests, added = [], []
        for number, ids in enumerate(self._prompts(model)):
            given = model.vocabulary.begin(ids)
            added.append(len(given) - len(ids))
            count = len(given) - len(model.vocabulary.before)
            if count + new > most:
                raise RequestError(
                    BAD_REQUEST,
                    f"prompt {number} has {count} tokens and max_tokens is {new}; this model has "
                    f"{most} positions for both",
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
        return requests, added

    def _prompts(self, model: ServedModel) -> list[Sequence[int]]:
        if isinstance(self.prompt, str):
            return [model.vocabulary.encode(self.prompt)]
        if not self.prompt:
            raise bad("prompt", "prompt is an empty list; a text or tokens were expected")
        if all(isinstance(part, int) for part in self.prompt):
            return [self._checked(model, [p for p in self.prompt if isinstance(p, int)])]
        found = []
        for part in self.prompt:
            if isinstance(part, int):
                raise bad("prompt", "prompt mixes tokens with texts or lists of tokens")
            is_text = isinstance(part, str)
            found.append(model.vocabulary.encode(part) if is_text else self._checked(model, part))
        return found

    @staticmethod
    def _checked(model: ServedModel, ids: list[int]) -> list[int]:
        size = model.vocabulary.size
        wrong = next((token for token in ids if token >= size), None)
        if wrong is not None:
            raise bad("prompt", f"prompt has the token {wrong}; 0 to {size - 1} was expected")
        return ids


def decoding_options(model: ServedModel, body: Any, most_tokens: int | None) -> DecodingOptions:
    """Returns the options that a body asks for. Raises RequestError if an option is wrong."""
    given: dict[str, Any] = {"beam_size": 1, "stop": listed(body.stop or ())}
    chosen = {"most_tokens": most_tokens, "temperature": body.temperature, "top_p": body.top_p}
    chosen["seed"] = body.seed
    given |= {name: value for name, value in chosen.items() if value is not None}
    try:
        options = model.published.options(DRAWING, given)
        return dataclasses.replace(options, best=(body.n or 1) if options.draws else 1)
    except UserError as error:
        raise options_error(error, BAD_REQUEST) from None


def bad(field: str, message: str) -> RequestError:
    """Returns the error of a request with a wrong field."""
    return RequestError(BAD_REQUEST, message, field)


PATH = "/v1/completions"


async def respond(service: Service, request: Request) -> Response:
    """Answers a request. Raises RequestError if it is wrong or cannot be answered."""
    service.check_task("language_model", PATH)
    data = await service.read(request)
    body = parse(data, CompletionsBody, BAD_REQUEST)
    deadline = service.deadline(body.timeout)
    body.check(service.model, service.limits)
    prepare = functools.partial(Completion, service.model, body)
    completion = await service.prepare(prepare, deadline, len(data))
    if body.echo and body.logprobs is not None:
        service.queue.check_size(len(completion.requests))
        async with service.until(deadline):
            completion.scores = [await service.score(each.given) for each in completion.requests]
    return await answer(service, request, completion, deadline, PATH)


async def answer(
    service: Service, request: Request, completion: Completion, deadline: float, path: str
) -> Response:
    """Returns the answer, at once or streamed. Raises RequestError if room or time is short."""
    answers = completion.submit(service, request)
    if completion.streams:
        return stream(service, path, _events(service, completion, answers, deadline))
    async with service.until(deadline), answers:
        return json_response(completion.complete(await answers.results()))


# Stands for the text of a request that asks for no new tokens.
_NOTHING = inference.Hypothesis((), (), 0.0, inference.LENGTH)


class Completion:
    """The parts of the answer to one request."""

    # Begins the id of an answer; the kinds of an answer and of a part of one.
    PREFIX, WHOLE, PART = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: ServedModel, body: Any):
        """Reads the prompts of a request. Raises RequestError if one does not fit the model."""
        self._model, self._body = model, body
        self.requests, self._added = body.requests(model)
        self.streams = bool(body.stream)
        self.scores: Sequence[TokenScores] = ()
        # Without a temperature all texts of a prompt are equal, so that one is enough.
        self._copies = 1 if self.requests[0].options.draws else body.n or 1
        self._head = {
            "id": f"{self.PREFIX}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
        }

    def complete(self, results: Sequence[Sequence[inference.Hypothesis]]) -> dict:
        """Returns the whole answer as a JSON value."""
        choices = [
            self._choice(number, found)
            for number, hypotheses in enumerate(results)
            for found in [*hypotheses] * self._copies
        ]
        for index, choice in enumerate(choices):
            choice["index"] = index
        head = {**self._head, "object": self.WHOLE}
        return {**head, "choices": choices, "usage": self.usage(results)}

    def usage(self, results: Sequence[Sequence[inference.Hypothesis]]) -> dict:
        """Returns the numbers of tokens, without those before all texts."""
        before = len(self._model.vocabulary.before)
        given = sum(len(request.given) - before for request in self.requests)
        new = self._copies * sum(
            len(found.log_probabilities) for hypotheses in results for found in hypotheses
        )
        return {"prompt_tokens": given, "completion_tokens": new, "total_tokens": given + new}

    def submit(self, service: Service, request: Request) -> Answers:
        """Has the engine answer, if tokens are wanted. Raises RequestError if there is no room."""
        if self._body.max_tokens != 0:
            return service.submit(self.requests, request, BAD_REQUEST)
        service.queue.check_size(sum(one.options.texts for one in self.requests))
        answers = Answers([inference.Answer(one) for one in self.requests], request.receive)
        for number, one in enumerate(self.requests):
            answers.put(number, inference.Finished((_NOTHING,) * one.options.texts))
        return answers

    @property
    def count(self) -> int:
        """The number of choices for each prompt."""
        return self.requests[0].options.best * self._copies

    def growing(self) -> list[GrowingText]:
        """Returns the text of each choice, without any token yet."""
        return [self._growing(request) for request in self.requests for _ in range(self.count)]

    def first_parts(self) -> Iterator[dict]:
        """Yields the parts of a streamed answer that need no new token: prompts that are echoed."""
        if not self._body.echo:
            return
        for index in range(len(self.requests) * self.count):
            request = self.requests[index // self.count]
            logprobs = self._echoed(index // self.count) if self.scores else None
            text = echo(self._model.vocabulary, request.given)
            if text or logprobs:
                yield self.part(index, text, logprobs=logprobs)

    def part(
        self,
        index: int,
        text: str,
        reason: str | None = None,
        logprobs: dict | None = None,
        calls: Sequence[Any] = (),
    ) -> dict:
        """Returns a part of a streamed answer as a JSON value."""
        content = self._content(text, calls, is_part=True)
        choice = {"index": index, **content, "finish_reason": reason, "logprobs": logprobs}
        choice |= seed_json(self.requests[index // self.count])
        return {**self._head, "object": self.PART, "choices": [choice]}

    def new_part(self, index: int, growing: GrowingText, new: inference.NewTokens) -> dict | None:
        """Returns the part of a streamed answer for new tokens; None if it has nothing to say.

        Log-probabilities come with their tokens, whose text may come later.
        """
        logprobs = self._logprobs(growing, new.tokens, new.log_probabilities)
        text = growing.add(self._shown(new.tokens))
        return self.part(index, text, logprobs=logprobs) if text or logprobs else None

    def last_part(self, results: Sequence[Sequence[inference.Hypothesis]]) -> dict | None:
        """Returns the part that counts tokens; None if it was not asked for."""
        wanted = self._body.stream_options
        if not wanted or not wanted.include_usage:
            return None
        head = {**self._head, "object": self.PART}
        return {**head, "choices": [], "usage": self.usage(results)}

    def _choice(self, number: int, found: inference.Hypothesis) -> dict:
        """Returns a choice for the prompt with a number."""
        request = self.requests[number]
        growing = self._growing(request)
        tokens = found.tokens if found.end is None else (*found.tokens, found.end)
        logprobs = self._logprobs(growing, tokens, found.log_probabilities)
        text = growing.add(self._shown(tokens), is_last=True)
        if self._body.echo:
            text = echo(self._model.vocabulary, request.given) + text
            if logprobs and self.scores:
                echoed = self._echoed(number)
                logprobs = {
                    name: None if first is None else first + logprobs[name]
                    for name, first in echoed.items()
                }
        reason = finish_reason(found, growing)
        choice = {"index": 0, **self._content(text, growing.calls), "finish_reason": reason}
        return {**choice, "logprobs": logprobs, **seed_json(request)}

    def _content(self, text: str, calls: Sequence[Any] = (), is_part: bool = False) -> dict:
        """Returns the fields of a choice, or of a part of one, that have its text and calls."""
        del calls, is_part
        return {"text": text}

    def _shown(self, tokens: Sequence[int]) -> Sequence[int]:
        """Returns the tokens whose text is in the answer."""
        return tokens

    def _growing(self, request: inference.Request) -> GrowingText:
        vocabulary, options = self._model.vocabulary, request.options
        return GrowingText(vocabulary, request.given, options.stop, bool(self._body.echo))

    def _logprobs(
        self, growing: GrowingText, tokens: Sequence[int], values: Sequence[float]
    ) -> dict | None:
        """Returns `logprobs` of the next tokens and the end of a text; None if not asked for."""
        if self._body.logprobs is None:
            return None
        pieces = list(map(self._model.vocabulary.piece, tokens))
        pairs = zip(pieces, values, strict=True)
        is_top = self._body.logprobs == 1
        return {
            "tokens": pieces,
            "token_logprobs": list(values),
            "top_logprobs": [{piece: value} for piece, value in pairs] if is_top else None,
            "text_offset": growing.offsets(tokens),
        }

    def _echoed(self, number: int) -> dict:
        """Returns `logprobs` of the tokens of a prompt, without tokens that the server added.

        The first token of a text has no log-probability.
        """
        vocabulary, scores = self._model.vocabulary, self.scores[number]
        given = self.requests[number].given
        first = self._added[number]
        growing = GrowingText(vocabulary)
        names = [piece_name(vocabulary, token) for token in given]
        values: list[float | None] = [None, *map(float, scores.log_probabilities)]
        tops: list[dict[str, float] | None] = [None]
        for place, (token, value) in enumerate(zip(scores.likeliest, scores.largest, strict=True)):
            top = {piece_name(vocabulary, int(token)): float(value)}
            own = scores.log_probabilities[place]
            tops.append({names[place + 1]: float(own)} | top)
        return {
            "tokens": names[first:],
            "token_logprobs": values[first:],
            "top_logprobs": tops[first:] if self._body.logprobs else None,
            "text_offset": growing.offsets(given)[first:],
        }


def piece_name(vocabulary: Vocabulary, token: int) -> str:
    """Returns the text of a token, or a name for a token that is a part of a character."""
    piece = vocabulary.piece(token)
    return f"token_id:{token}" if "\ufffd" in piece or not piece else piece


def finish_reason(found: inference.Hypothesis, text: GrowingText) -> str:
    """Returns why a text ended, in the API's words."""
    if text.calls:
        return "tool_calls"
    return "stop" if found.reason in (inference.END, inference.STOP) else "length"


async def _events(
    service: Service, completion: Completion, answers: Answers, deadline: float
) -> AsyncGenerator[str]:
    """Yields the server-sent events of a streamed answer."""
    async with answers:
        async for part in _parts(service, completion, answers, deadline):
            yield server_sent(part)
    yield "data: [DONE]\n\n"


async def _parts(
    service: Service, completion: Completion, answers: Answers, deadline: float
) -> AsyncIterator[dict]:
    """Yields the parts of a streamed answer: new text, the reason of each end, and the usage."""
    growing, count = completion.growing(), completion.count
    for part in completion.first_parts():
        yield part
    results: dict[int, Sequence[inference.Hypothesis]] = {}
    while len(results) < len(completion.requests):
        async with service.until(deadline):
            number, event = await answers.next()
        first = number * count
        if isinstance(event, inference.NewTokens):
            # Without a temperature, the one text that is decoded stands for all choices.
            own = range(first, first + count)
            draws = completion.requests[number].options.draws
            for index in own[event.text : event.text + 1] if draws else own:
                if part := completion.new_part(index, growing[index], event):
                    yield part
        elif isinstance(event, inference.Finished):
            results[number] = event.hypotheses
            for index in range(first, first + count):
                found = event.hypotheses[min(index - first, len(event.hypotheses) - 1)]
                text = growing[index]
                rest = text.add((), is_last=True)
                reason = finish_reason(found, text)
                yield completion.part(index, rest, reason, calls=text.calls)
    last = completion.last_part([results[n] for n in range(len(completion.requests))])
    if last:
        yield last
