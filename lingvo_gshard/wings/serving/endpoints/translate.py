"""POST /v1/translate: translates one sentence or several."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from lingvo_gshard.core import names
from lingvo_gshard.wings.inference import requests as inference
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.translator import Translator
from lingvo_gshard.wings.serving.bodies import SearchBody, Texts, parse, with_options
from lingvo_gshard.wings.serving.endpoints.state import seed_json, text_json
from lingvo_gshard.wings.serving.errors import json_response, unprocessable
from lingvo_gshard.wings.serving.service import Service

PATH = "/v1/translate"


@with_options(DecodingOptions())
class TranslateBody(SearchBody, kw_only=True, forbid_unknown_fields=True):
    """The body of a request.

    Attributes:
      text: a sentence, or several.
      prefix: what the translation must begin with, or one for each sentence.
      language: the language of the sentences. The model needs none; one that it was not trained on
        is refused.
    """

    text: Texts
    prefix: Texts = ""
    language: str | None = None


async def respond(service: Service, request: Request) -> Response:
    """Answers a request. Raises RequestError if it is wrong or cannot be answered."""
    service.check_task("translation", PATH)
    data = await service.read(request)
    body = parse(data, TranslateBody, published=service.model.published)
    deadline = service.deadline(body.timeout)
    options = service.checked_search(body)
    prepare = functools.partial(_requests, service, body, options)
    asked = await service.prepare(prepare, deadline, len(data))
    async with service.until(deadline):
        async with service.submit([one for one in asked if one], request) as answers:
            found = iter(await answers.results())
        results = []
        for text, one in zip(names.listed(body.text), asked, strict=True):
            hypotheses = next(found) if one else ()
            results.append(await _result(service, text, one, hypotheses, body.routing))
    model = service.model
    return json_response({"model": model.name, "step": model.step, "translations": results})


def _requests(
    service: Service, body: TranslateBody, options: DecodingOptions
) -> list[inference.Request | None]:
    """Returns the translator's request for each sentence; None for an empty sentence."""
    translator, texts = _translator(service), names.listed(body.text)
    prefixes = [body.prefix] * len(texts) if isinstance(body.prefix, str) else body.prefix
    _check(service, body, texts, prefixes)
    requests = []
    for index, ids in enumerate(translator.encode(texts)):
        if len(ids) > translator.longest_text:
            field = "text" if isinstance(body.text, str) else f"text[{index}]"
            raise unprocessable(
                field,
                f"{field} has {len(ids)} tokens; the model reads {translator.longest_text} at "
                "most. Split it into sentences",
            )
        requests.append(translator.request(ids, options, prefixes[index]) if ids else None)
    return requests


def _check(
    service: Service, body: TranslateBody, texts: Sequence[str], prefixes: Sequence[str]
) -> None:
    """Raises RequestError for too few prefixes or a language without training data."""
    if len(prefixes) != len(texts):
        raise unprocessable(
            "prefix",
            f"prefix has {len(prefixes)} texts; {len(texts)}, one for each sentence, were expected",
        )
    languages = service.model.languages
    if body.language is not None and languages and body.language not in languages:
        raise unprocessable(
            "language",
            f"language is {body.language!r}, which {service.model.name} was not trained on. "
            f"{names.nearest(body.language, languages)}",
        )


async def _result(
    service: Service,
    text: str,
    request: inference.Request | None,
    hypotheses: Sequence[inference.Hypothesis],
    routing: bool,
) -> dict:
    """Returns the translations of one sentence as a JSON value."""
    if request is None:
        return {"source": text, "text": "", "alternatives": []}
    translations = _translator(service).translations(request, hypotheses)
    alternatives = [text_json(each, each.text, each.pieces) for each in translations]
    if routing:
        for alternative, hypothesis in zip(alternatives, hypotheses, strict=True):
            alternative["routing"] = await service.routing(request, hypothesis)
    found = {"source": text, "text": translations[0].text, "alternatives": alternatives}
    return found | seed_json(request)


def _translator(service: Service) -> Translator:
    translator = service.model.translator
    assert translator is not None
    return translator
