"""POST /v1/chat/completions: answers conversations, in the format of OpenAI's API.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from lingvo_gshard.core import UserError
from lingvo_gshard.wings.fine_tuning.conversations.answers import encode_marked, end_of_turn
from lingvo_gshard.wings.fine_tuning.conversations.chat_template import ChatTemplate
from lingvo_gshard.wings.inference import requests as inference
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.text import GrowingText, stop_check
from lingvo_gshard.wings.serving.bodies import Count, parse
from lingvo_gshard.wings.serving.endpoints.completions import (
    BAD_REQUEST,
    BaseBody,
    Completion,
    answer,
    bad,
    decoding_options,
)
from lingvo_gshard.wings.serving.endpoints.tool_calls import (
    CallingText,
    calls_json,
    format_of,
    types_in,
)
from lingvo_gshard.wings.serving.errors import RequestError
from lingvo_gshard.wings.serving.limits import Limits
from lingvo_gshard.wings.serving.model import ServedModel
from lingvo_gshard.wings.serving.service import Service

PATH = "/v1/chat/completions"


class ChatBody(BaseBody, kw_only=True):
    """The fields of OpenAI's API, `timeout` in seconds, and three fields that vLLM has as well.

    `chat_template_kwargs` are further values for the template. `stop_token_ids` end the answer.
    Without `add_generation_prompt`, the template does not begin an answer.
    """

    ABSENT = {  # noqa: RUF012
        **BaseBody.ABSENT,
        "response_format": (None, {"type": "text"}),
        "tool_choice": (None, "auto", "none"),
    }

    # Answers repeat no prompt.
    echo: ClassVar[bool] = False

    messages: list[dict[str, Any]]
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stop_token_ids: list[Count] | None = None
    add_generation_prompt: bool = True

    def check(self, model: ServedModel, limits: Limits) -> None:
        super().check(model, limits)
        if not self.messages:
            raise bad("messages", "messages is an empty list; one message or more was expected")
        if self.top_logprobs and not self.logprobs:
            raise bad("top_logprobs", "top_logprobs needs logprobs=true")
        if (self.top_logprobs or 0) > int(self.temperature == 0):
            raise bad(
                "top_logprobs",
                f"top_logprobs is {self.top_logprobs}; this server has the log-probabilities of "
                "the chosen tokens only: top_logprobs=0, or 1 with temperature=0",
            )

    def requests(self, model: ServedModel) -> tuple[list[inference.Request], list[int]]:
        """Returns the conversation's request. Raises RequestError if it is refused or too long."""
        most_tokens = self.max_completion_tokens or self.max_tokens
        ids, options = self._ids(model), decoding_options(model, self, most_tokens)
        most = model.engine.facts.most_positions
        room = most - len(ids)
        if room < max(options.most_tokens, 1):
            raise RequestError(
                BAD_REQUEST,
                f"the conversation has {len(ids)} tokens and max_tokens is "
                f"{options.most_tokens or 'not given'}; this model has {most} positions for both",
                "messages",
                "context_length_exceeded",
            )
        request = inference.Request(
            given=ids,
            options=dataclasses.replace(options, most_tokens=options.most_tokens or room),
            streams=bool(self.stream),
            should_stop=self._stop_check(model, options),
        )
        return [request], [0]

    def _ids(self, model: ServedModel) -> list[int]:
        """Returns the tokens of the conversation, as the template writes it."""
        if model.template is None:
            problem = f"the model {model.name!r} has no chat template; use /v1/completions"
            raise bad("messages", problem)
        messages = [_checked(number, message) for number, message in enumerate(self.messages)]
        try:
            text = self._written(model.template, messages, self.tools)
            if self.tools and text == self._written(model.template, messages, None):
                raise bad(
                    "tools",
                    f"the chat template of {model.name!r} writes no tools, so that the model would "
                    "not know them; leave them out or describe them in a message",
                )
            ids = encode_marked(model.vocabulary, text)
        except UserError as error:
            raise bad("messages", str(error)) from None
        if not ids:
            raise bad("messages", "the chat template writes nothing for these messages")
        return ids

    def _written(self, template: ChatTemplate, messages: list[dict], tools: Any) -> str:
        """Returns the text of messages. Arguments of calls are texts only if they must be."""
        rest = tools, self.add_generation_prompt, self.chat_template_kwargs
        read = [_with_arguments(message) for message in messages]
        try:
            return template.render(read, *rest).text
        except UserError:
            if read == messages:
                raise
            return template.render(messages, *rest).text

    def stops(self, model: ServedModel) -> frozenset[int]:
        """Returns the ids that end an answer, besides the ends of the model's texts."""
        assert model.template is not None
        own = end_of_turn(model.vocabulary, model.template)
        return frozenset((*(self.stop_token_ids or ()), *own))

    def _stop_check(self, model: ServedModel, options: DecodingOptions) -> Any:
        """Returns a function that says whether tokens end an answer; None if nothing could."""
        of_text, stops = stop_check(model.vocabulary, (), options), self.stops(model)
        if not stops:
            return of_text
        return lambda tokens: tokens[-1] in stops or bool(of_text and of_text(tokens))


def _checked(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose content is one text. Raises RequestError without a role or a text."""
    field = f"messages[{number}]"
    if not isinstance(message.get("role"), str):
        raise bad(f"{field}.role", f"{field}.role is missing; a text was expected")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise bad(f"{field}.content", f"{field}.content must be a text or a list of parts")
    for place, part in enumerate(content):
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise bad(
                f"{field}.content[{place}]",
                f"{field}.content[{place}] has the type {kind!r}; this model reads text only",
            )
    return {**message, "content": "".join(part["text"] for part in content)}


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose calls have arguments as objects: OpenAI's format has JSON texts."""
    calls = copy.deepcopy(message.get("tool_calls"))
    try:
        for call in calls or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return message
    return {**message, "tool_calls": calls} if calls else message


async def respond(service: Service, request: Request) -> Response:
    """Answers a request. Raises RequestError if it is wrong or cannot be answered."""
    service.check_task("language_model", PATH)
    data = await service.read(request)
    body = parse(data, ChatBody, BAD_REQUEST)
    deadline = service.deadline(body.timeout)
    body.check(service.model, service.limits)
    prepare = functools.partial(_Chat, service.model, body)
    # A template may take its time, however short the conversation is.
    chat = await service.prepare(prepare, deadline)
    return await answer(service, request, chat, deadline, PATH)


class _Chat(Completion):
    """The parts of the answer to a conversation."""

    PREFIX, WHOLE, PART = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: ServedModel, body: ChatBody):
        super().__init__(model, body)
        self._stops = body.stops(model)
        wants_calls = body.tools and body.tool_choice != "none"
        self._form = format_of(model.template.source) if wants_calls and model.template else None
        self._types = types_in(body.tools or ())

    def first_parts(self) -> Iterator[dict]:
        """Yields a part with the role of each answer."""
        for index in range(self.count):
            part = self.part(index, "")
            part["choices"][0]["delta"] = {"role": "assistant", "content": ""}
            yield part

    def _content(self, text: str, calls: Sequence[Any] = (), is_part: bool = False) -> dict:
        found = {"tool_calls": calls_json(calls)} if calls else {}
        if is_part:
            return {"delta": {**({"content": text} if text else {}), **found}}
        for call in found.get("tool_calls", ()):
            del call["index"]
        content = text.strip() or None if calls else text
        return {"message": {"role": "assistant", "content": content, "refusal": None, **found}}

    def _shown(self, tokens: Sequence[int]) -> Sequence[int]:
        return [token for token in tokens if token not in self._stops]

    def _growing(self, request: inference.Request) -> GrowingText:
        # An answer is a text of its own, and begins without the space before a word.
        given = self._model.vocabulary, (), request.options.stop
        return CallingText(self._form, self._types, *given) if self._form else GrowingText(*given)

    def _logprobs(
        self, growing: GrowingText, tokens: Sequence[int], values: Sequence[float]
    ) -> dict | None:
        del growing
        if not self._body.logprobs:
            return None
        found = []
        for token, value in zip(tokens, values, strict=True):
            piece = self._model.vocabulary.piece(token)
            named = {"token": piece, "logprob": value, "bytes": list(piece.encode("utf-8"))}
            top = [named] if self._body.top_logprobs else []
            found.append({**named, "top_logprobs": top})
        return {"content": found, "refusal": None}
