"""Renders and encodes conversations by transformers, with the templates that trl has.

Runs in a Python that has both libraries, which tests find by `PEERS_PYTHON`:

    python peer_process.py CASES.json ANSWERS.json

CASES.json is a list of {"template", "messages", "tools", "prompt", "tokenizer"}. `template` is the
name of a file of trl. With `tokenizer`, a folder, ids and marks of the assistant's tokens are
answered, too.
"""

import datetime
import json
import pathlib
import sys

import transformers
import trl
from transformers.utils import chat_template_utils

TEMPLATES = pathlib.Path(trl.__file__).parent / "chat_templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class NewYear(datetime.datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz=None):
        """Returns the same day whenever it is asked."""
        return cls(2025, 1, 1, tzinfo=tz)


def answer(case):
    """Returns the source of a template, and the text or the error that it gives."""
    source = (TEMPLATES / f"{case['template']}.jinja").read_text(encoding="utf-8")
    result, messages = {"source": source}, case["messages"]
    # 5.24 drops nulls, and templates that ask for them fail. Earlier versions gave them.
    if "['content'] is none" not in source:
        messages = chat_template_utils._normalize_chat_messages(messages)
    try:
        (text,), spans = chat_template_utils.render_jinja_template(
            [messages],
            tools=case.get("tools"),
            chat_template=source,
            add_generation_prompt=case.get("prompt", False),
            return_assistant_tokens_mask=case.get("spans", False),
            **TOKENS,
        )
        result |= {"text": text, "spans": spans}
    except Exception as error:
        return result | {"error": type(error).__name__}
    if case.get("tokenizer"):
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=f"{case['tokenizer']}/tokenizer.json", **TOKENS
        )
        encoded = tokenizer.apply_chat_template(
            case["messages"],
            tools=case.get("tools"),
            chat_template=source,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        result |= {"ids": encoded["input_ids"], "marks": encoded["assistant_masks"]}
    return result


def main():
    """Answers all cases."""
    chat_template_utils.datetime = NewYear
    cases, answers = map(pathlib.Path, sys.argv[1:])
    found = [answer(case) for case in json.loads(cases.read_text(encoding="utf-8"))]
    answers.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
