"""A small published model with a chat template, and conversations in its few words."""

import json

from tests.open_models import published

# <s> w4 of a user, w5 of an assistant, <end> after each turn.
TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {{- 'w4 ' if message.role == 'user' else 'w5 ' }}{{ message.content }}{{ ' <end> ' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'w5 ' }}{%- endif %}"""


def write(directory, **config):
    """Writes the model of tests/open_models/published.py with the template; returns its tensors."""
    tensors = published.write(directory, **config)
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return tensors


def turns(*texts):
    """Returns a conversation of a user and an assistant who take turns."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


CONVERSATIONS = (
    {"messages": turns("w6 w7", "w8 w9 w10", "w11", "w12")},
    {"messages": turns("w13", "w14")},
    {"prompt": "w15 w16", "completion": " w17 w18"},
    {"prompt": turns("w6", "w7", "w8"), "completion": turns("w19", "w9")[1:]},
    {"messages": turns("w20 w21 w22", "w23 w6 w8 w4")},
)


def write_lines(path, rows=CONVERSATIONS):
    """Writes rows as JSON lines, and returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
