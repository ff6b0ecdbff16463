"""GET /openapi.json: describes the interface of the server for programs.

The bodies are described from the same types that read them. https://spec.openapis.org/oas/v3.1.0
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lingvo_gshard.core import VERSION, objects
from lingvo_gshard.wings.serving.endpoints import chat, completions, generate, state, translate
from lingvo_gshard.wings.serving.errors import json_response
from lingvo_gshard.wings.serving.service import Service

Respond: TypeAlias = "Callable[[Service, Request], Awaitable[Response]]"

PATH = "/openapi.json"
_REFERENCE = "#/components/schemas/{name}"


class _Answers(msgspec.Struct, frozen=True):
    """Answers that are no success: what each status says, and the schema of their bodies."""

    statuses: dict[str, str]
    error: dict[str, Any]


_ANSWERS = objects.table_beside(__file__, "answers.json", _Answers)


@dataclasses.dataclass(frozen=True)
class Operation:
    """Answers the requests for one path, and describes them.

    Attributes:
      body: the type of the body of POST; None for GET.
      streams: whether the answer may be server-sent events.
      is_open: whether requests need no bearer token.
    """

    respond: Respond
    summary: str
    body: type[msgspec.Struct] | None = None
    streams: bool = False
    is_open: bool = False

    @property
    def method(self) -> str:
        """The method of HTTP, in lower case."""
        return "post" if self.body else "get"


async def respond(service: Service, request: Request) -> Response:
    """Answers with the description of all paths."""
    del request
    found = describe(service.model.name, VERSION, service.has_token)
    return json_response(found)


def describe(name: str, version: str, has_token: bool) -> dict[str, Any]:
    """Returns the description as a JSON value."""
    bodies = [each.body for each in OPERATIONS.values() if each.body]
    references, schemas = msgspec.json.schema_components(bodies, ref_template=_REFERENCE)
    of_body = dict(zip(bodies, references, strict=True))
    paths = {
        path: {each.method: _operation(path, each, of_body[each.body] if each.body else None)}
        for path, each in OPERATIONS.items()
    }
    components: dict[str, Any] = {"schemas": {**schemas, "Error": _ANSWERS.error}}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": f"lingvo_gshard: {name}", "version": version},
        "paths": paths,
        "components": components,
    }
    if has_token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"token": []}]
    return found


def _operation(path: str, operation: Operation, schema: Any) -> dict[str, Any]:
    error = {"schema": {"$ref": _REFERENCE.format(name="Error")}}
    kinds = ["application/json", *(["text/event-stream"] if operation.streams else [])]
    answers: dict[str, Any] = {
        status: {"description": said, "content": {"application/json": error}}
        for status, said in _ANSWERS.statuses.items()
    }
    answers["200"] = {"description": "Success.", "content": {kind: {} for kind in kinds}}
    found: dict[str, Any] = {"summary": operation.summary, "responses": answers}
    if schema is not None:
        found["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if names := re.findall(r"{(\w+)}", path):
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return found


OPERATIONS: Mapping[str, Operation] = {
    chat.PATH: Operation(chat.respond, "Answers a conversation.", chat.ChatBody, streams=True),
    completions.PATH: Operation(
        completions.respond,
        "Continues texts, or scores them with echo and logprobs.",
        completions.CompletionsBody,
        streams=True,
    ),
    generate.PATH: Operation(
        generate.respond, "Continues a text.", generate.GenerateBody, streams=True
    ),
    translate.PATH: Operation(translate.respond, "Translates sentences.", translate.TranslateBody),
    "/v1/models": Operation(state.models, "Describes the model."),
    "/v1/models/{model}": Operation(state.one_model, "Describes the model."),
    "/healthz": Operation(state.health, "Says whether requests are accepted.", is_open=True),
    "/healthz/live": Operation(
        state.live, "Says whether only a new process would help.", is_open=True
    ),
    "/metrics": Operation(state.metrics, "Returns metrics for Prometheus."),
    PATH: Operation(respond, "Returns this description.", is_open=True),
}
