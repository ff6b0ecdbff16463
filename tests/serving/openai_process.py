"""Uses a server by OpenAI's client, in a Python that has it, and writes what it got.

python openai_process.py http://127.0.0.1:8000/v1 ANSWERS.json
"""

import json
import pathlib
import sys

import openai

MESSAGES = [{"role": "user", "content": "w6 w7"}]


def error_of(call):
    """Returns what the client makes of an error of the server."""
    try:
        call()
    except openai.APIStatusError as error:
        found = error.body
        return {
            "kind": type(error).__name__,
            "status": error.status_code,
            "code": found["code"],
            "param": found["param"],
            "message": found["message"],
        }
    return None


def main():
    """Asks, and writes the answers."""
    url, path = sys.argv[1:]
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    (model,) = client.models.list().data
    options = {"model": model.id, "messages": MESSAGES, "max_tokens": 6}
    chat = client.chat.completions.create(**options, temperature=0, logprobs=True)
    parts = list(
        client.chat.completions.create(
            **options, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    drawn = client.chat.completions.create(**options, n=2, seed=3)
    scored = client.completions.create(
        model=model.id, prompt="w6 w7 w8", max_tokens=0, echo=True, logprobs=1
    )
    found = {
        "model": client.models.retrieve(model.id).model_dump(),
        "text": chat.choices[0].message.content,
        "role": chat.choices[0].message.role,
        "reason": chat.choices[0].finish_reason,
        "tokens": [each.token for each in chat.choices[0].logprobs.content],
        "usage": chat.usage.model_dump(),
        "streamed": "".join(p.choices[0].delta.content or "" for p in parts if p.choices),
        "streamed_role": parts[0].choices[0].delta.role,
        "streamed_reason": [p.choices[0].finish_reason for p in parts if p.choices][-1],
        "streamed_usage": parts[-1].usage.model_dump(),
        "drawn": [choice.message.content for choice in drawn.choices],
        "scored": scored.choices[0].model_dump(),
        "errors": [
            error_of(lambda: client.models.retrieve("gpt-4")),
            error_of(lambda: client.chat.completions.create(model=model.id, messages=[])),
            error_of(lambda: client.chat.completions.create(**(options | {"max_tokens": 999}))),
            error_of(lambda: client.chat.completions.create(**options, top_p=3)),
            error_of(lambda: client.chat.completions.create(**options, extra_body={"topp": 1})),
            error_of(lambda: client.embeddings.create(model=model.id, input="w6")),
        ],
    }
    pathlib.Path(path).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
