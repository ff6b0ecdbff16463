"""POST /v1/generate: continues a text, at once or as server-sent events."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request
from starlette.responses import Response

from lingvo_gshard.wings.inference import requests as inference
from lingvo_gshard.wings.inference.options import DRAWING, DecodingOptions
from lingvo_gshard.wings.inference.requests import Finished
from lingvo_gshard.wings.inference.text import GrowingText, continuation, stop_check
from lingvo_gshard.wings.serving.admission_queue import Answers
from lingvo_gshard.wings.serving.bodies import SearchBody, parse, with_options
from lingvo_gshard.wings.serving.endpoints.events import server_sent, stream
from lingvo_gshard.wings.serving.endpoints.state import seed_json, text_json
from lingvo_gshard.wings.serving.errors import json_response, unprocessable
from lingvo_gshard.wings.serving.model import ServedModel
from lingvo_gshard.wings.serving.service import Service

PATH = "/v1/generate"


@with_options(DRAWING)
class GenerateBody(SearchBody, kw_only=True, forbid_unknown_fields=True):
    """The body of a request. An empty prompt lets the model begin."""

    prompt: str = ""
    stream: bool = False


async def respond(service: Service, request: Request) -> Response:
    """Answers a request. Raises RequestError if it is wrong or cannot be answered."""
    service.check_task("language_model", PATH)
    data = await service.read(request)
    body = parse(data, GenerateBody, published=service.model.published)
    deadline = service.deadline(body.timeout)
    options = service.checked_search(body)
    prepare = functools.partial(_request, service.model, body, options)
    asked = await service.prepare(prepare, deadline, len(data))
    answers = service.submit([asked], request)
    if body.stream:
        events = _events(service, asked, answers, deadline, body.routing)
        return stream(service, PATH, events, "error")
    async with service.until(deadline), answers:
        (hypotheses,) = await answers.results()
        texts = await _texts(service, asked, hypotheses, body.routing)
    model = service.model
    found = {"model": model.name, "step": model.step, "texts": texts}
    return json_response(found | seed_json(asked))


def _request(model: ServedModel, body: GenerateBody, options: DecodingOptions) -> inference.Request:
    given = model.vocabulary.begin(model.vocabulary.encode(body.prompt))
    most, before = model.engine.facts.most_positions, len(model.vocabulary.before)
    if len(given) > most:
        raise unprocessable(
            "prompt",
            f"prompt has {len(given) - before} tokens; the model reads {most - before} at most",
        )
    return inference.Request(
        given=given,
        options=options,
        streams=body.stream,
        should_stop=stop_check(model.vocabulary, given, options),
    )


async def _texts(
    service: Service,
    request: inference.Request,
    hypotheses: Sequence[inference.Hypothesis],
    routing: bool,
) -> list[dict]:
    """Returns the complete texts as JSON values."""
    vocabulary, stop, texts = service.model.vocabulary, request.options.stop, []
    for found in hypotheses:
        text = continuation(vocabulary, request.given, found.tokens, stop)
        made = text_json(found, text, list(map(vocabulary.piece, found.tokens)))
        if routing:
            made["routing"] = await service.routing(request, found)
        texts.append(made)
    return texts


async def _events(
    service: Service, request: inference.Request, answers: Answers, deadline: float, routing: bool
) -> AsyncGenerator[str]:
    """Yields server-sent events: new text as it comes, then `done` with the complete texts."""
    model, options = service.model, request.options
    growing = [
        GrowingText(model.vocabulary, request.given, options.stop) for _ in range(options.texts)
    ]
    async with answers:
        while True:
            async with service.until(deadline):
                _, event = await answers.next()
            if isinstance(event, Finished):
                for index, text in enumerate(growing):
                    if rest := text.add((), is_last=True):
                        yield server_sent({"index": index, "text": rest})
                async with service.until(deadline):
                    texts = await _texts(service, request, event.hypotheses, routing)
                yield server_sent({"texts": texts} | seed_json(request), "done")
                return
            new = growing[event.text].add(event.tokens)
            if new:
                yield server_sent({"index": event.text, "text": new})
