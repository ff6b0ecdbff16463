"""GET /healthz, /metrics and /v1/models: what the server is and how it is doing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from lingvo_gshard.wings.inference import requests as inference
from lingvo_gshard.wings.inference.requests import END
from lingvo_gshard.wings.inference.translator import Translation
from lingvo_gshard.wings.serving.errors import json_response
from lingvo_gshard.wings.serving.service import Service


async def health(service: Service, request: Request) -> Response:
    """Answers with 200 while the server takes requests; with 503 before it stops, or if stuck."""
    del request
    engine, seconds = service.model.engine, service.limits.stuck_seconds
    dead = engine.stuck(seconds)
    stuck = [*dead, *engine.stuck_programs(seconds)]
    is_ready = not (service.is_draining or stuck)
    state = {
        "status": "draining" if service.is_draining else "stuck" if stuck else "ok",
        "live": not dead,
        "ready": is_ready,
        "stuck": stuck,
        "model": service.model.name,
        "step": service.model.step,
        "texts_under_way": service.queue.under_way,
        "queue_size": service.limits.queue_size,
    }
    if service.directory:
        state["directory"] = await run_in_threadpool(service.directory.state)
    return json_response(state, 200 if is_ready else 503)


async def live(service: Service, request: Request) -> Response:
    """Answers with 200, or with 503 if decoding threads are stuck: then only a new process helps.

    A stuck compiler does not count. It is replaced, or only the requests that need it wait.
    """
    del request
    stuck = service.model.engine.stuck(service.limits.stuck_seconds)
    return json_response({"live": not stuck, "stuck": stuck}, 503 if stuck else 200)


async def metrics(service: Service, request: Request) -> Response:
    """Answers with all metrics in Prometheus's text format."""
    del request
    text, media_type = service.metrics.text()
    return Response(text, media_type=media_type)


async def models(service: Service, request: Request) -> Response:
    """Answers with the served model in the format of OpenAI's API, with some more fields."""
    del request
    return json_response({"object": "list", "data": [_described(service)]})


async def one_model(service: Service, request: Request) -> Response:
    """Answers with the model of the name in the path. Raises RequestError for any other name."""
    service.model.check_name(request.path_params["model"])
    return json_response(_described(service))


def _described(service: Service) -> dict:
    model, facts = service.model, service.model.engine.facts
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "lingvo_gshard",
        "task": model.task,
        "step": model.step,
        "languages": model.languages,
        "most_tokens": facts.most_source - 1 if facts.has_source else facts.most_positions - 1,
        "most_beam_size": service.limits.most_beam_size,
        "has_chat_template": model.template is not None,
        "examples": model.examples,
    }


def text_json(
    found: inference.Hypothesis | Translation, text: str, pieces: Sequence[str]
) -> dict[str, Any]:
    """Returns a text and its tokens as JSON; `pieces` lack the end, which may be the last token."""
    end = ["</s>"] if found.reason == END else []
    tokens = [
        {"text": piece, "log_probability": value}
        for piece, value in zip([*pieces, *end], found.log_probabilities, strict=True)
    ]
    return {"text": text, "score": found.score, "reason": found.reason, "tokens": tokens}


def seed_json(request: inference.Request) -> dict:
    """Returns the field that tells the seed of a request's draws, if it draws."""
    return {} if request.seed is None else {"seed": request.seed}
