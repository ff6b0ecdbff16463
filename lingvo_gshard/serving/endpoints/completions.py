"""POST /v1/completions: continues texts, in the format of OpenAI's API.

https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from lingvo_gshard.inference import requests as inference
from lingvo_gshard.inference.requests import END, STOP, Finished, Hypothesis, NewTokens
from lingvo_gshard.inference.text import GrowingText, echo
from lingvo_gshard.serving.bodies import parse
from lingvo_gshard.serving.desk import Answers
from lingvo_gshard.serving.endpoints.completions_body import BAD_REQUEST, CompletionsBody
from lingvo_gshard.serving.endpoints.generate import STREAM_HEADERS
from lingvo_gshard.serving.endpoints.tokens import server_sent
from lingvo_gshard.serving.errors import ClientGoneError, RequestError, json_response
from lingvo_gshard.serving.model import ServedModel
from lingvo_gshard.serving.service import Service

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
        """Returns for each choice its request, its text to be, and the prompt if it is echoed."""
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
        """Returns `logprobs` of the next tokens of a text; that which ends it is one of them."""
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
