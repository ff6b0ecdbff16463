# tests: wings/fine_tuning/conversations/chat_template.py
# tests: wings/fine_tuning/conversations/template_program.py
"""Tests chat templates: the sandbox, and the bytes that transformers writes with the same ones."""

import json
import os
import pathlib
import subprocess

import pytest

from benchmarks.peer_python import find_python
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.wings.fine_tuning.conversations.chat_template import ChatTemplate, tokens_of
from tests.fine_tuning.conversations import chat_models

LIBRARIES = ("transformers", "trl")
PEER = pathlib.Path(__file__).with_name("peer_process.py")
# Templates of fourteen families, and those that mark what an assistant writes.
FAMILIES = (
    "cohere",
    "deepseek_r1_distill",
    "deepseekv3",
    "gemma3",
    "gemma4",
    "gemma4_v5",
    "glm4moe",
    "gptoss",
    "lfm2",
    "llama3",
    "llama3_2",
    "nemotron_3_nano",
    "phi3_5",
    "qwen2_5",
    "qwen3",
)
MARKED = ("gemma_training", "llama3_training", "qwen3_training", "gptoss_training")
PROPERTIES = {
    "x": {"type": "string", "description": "é <&>", "enum": ["1", "2"]},
    "y": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "number"}}}},
    "z": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["x"]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}
]
ARGUMENTS = {"x": "1", "y": [{"n": 0.5}], "z": {"n": 2, "b": True}}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": ARGUMENTS}}
CONVERSATIONS = (
    chat_models.turns("Hi", "Hello"),
    chat_models.turns(" Hi\n"),
    [
        {"role": "system", "content": "Be kind."},
        *chat_models.turns("Why?", "<think>\nhm\n</think>\n\nü <b>", "Bye", "Ciao"),
    ],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny", "reasoning": "seen", "name": None},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "sunny"},
    ],
    [{"role": "assistant", "content": "first"}, {"role": "wizard", "content": "?"}],
)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def ask(cases, folder):
    """Returns what transformers answers to cases; skips the test without the libraries."""
    python = find_python(os.environ.get("PEERS_PYTHON"), LIBRARIES)
    if not python:
        pytest.skip("trl is not installed, and PEERS_PYTHON names no Python with it")
    given, answers = folder / "cases.json", folder / "answers.json"
    given.write_text(json.dumps(cases), encoding="utf-8")
    subprocess.run([python, PEER, given, answers], check=True, env=os.environ | {"USE_TF": "0"})
    return json.loads(answers.read_text(encoding="utf-8"))


def test_families_are_written_as_transformers_does(tmp_path):
    cases = [
        {"template": name, "messages": messages, "tools": tools, "prompt": prompt}
        for name in FAMILIES
        for messages in CONVERSATIONS
        for tools in (None, TOOLS)
        for prompt in (False, True)
    ]
    cases += [{"template": n, "messages": m, "spans": True} for n in MARKED for m in CONVERSATIONS]
    equal = dict.fromkeys((*FAMILIES, *MARKED), 0)
    for case, answer in zip(cases, ask(cases, tmp_path), strict=True):
        template = ChatTemplate(answer["source"], TOKENS, case["template"]).at("2025-01-01")
        arguments = case["messages"], case.get("tools"), case.get("prompt", False)
        if "error" in answer:
            with pytest.raises(UserError, match="template"):
                template.render(*arguments)
            continue
        rendered = template.render(*arguments)
        assert rendered.text == answer["text"], case
        if "spans" in case:
            assert [list(span) for span in rendered.spans] == answer["spans"][0], case
        equal[case["template"]] += 1
    assert all(count >= 2 for count in equal.values()), equal


def render(source, messages=(), **arguments):
    return ChatTemplate(source, TOKENS, "here").render(messages, **arguments)


def test_a_template_writes_what_its_program_says():
    source = """{%- set ns = namespace(n=0) %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- set ns.n = ns.n + 1 %}
    {{- '[' ~ ns.n ~ ' ' ~ message.role ~ '] ' }}
    {%- generation %}{{ message.content | tojson }}{{ eos_token }}{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[a] ' }}{% endif %}"""
    messages = [
        {"role": "a", "content": "<é>"},
        {"role": "skip"},
        {"role": "b", "content": "y", "name": None},
    ]
    found = render(source, messages, add_generation_prompt=True)
    first = '[1 a] "<é>"</s>'
    assert found.text.startswith(first)
    assert found.spans[0] == (len("[1 a] "), len(first))


@pytest.mark.parametrize("content", [{"content": None}, {}], ids=["null", "missing"])
def test_a_template_that_asks_for_null_sees_it_beside_calls(content):
    """As DeepSeek's templates do, which fail if the key is missing."""
    source = """{%- for m in messages %}
{%- if m['role'] == 'assistant' and m['content'] is none %}{{ m.tool_calls[0].function.name }}
{%- elif m['role'] == 'assistant' and m['content'] is not none %}{{ m['content'] + eos_token }}
{%- endif %}{% endfor %}"""
    turn = {"role": "assistant", "tool_calls": [CALL], **content}
    assert render(source, [turn]).text == "f"
    assert render(source, [turn | {"content": "a"}]).text == "a</s>"
    # Others would write "None".
    assert render("{{ messages[0].content }}", [turn]).text == ""


@pytest.mark.parametrize("content", [{"content": None}, {}], ids=["null", "missing"])
def test_a_template_that_does_well_with_a_missing_content_sees_no_null(content):
    """As the template of Ministral 3, which asks for null and for a length."""
    source = """{%- for m in messages %}
{%- if m.content is none and not m.tool_calls %}{{ raise_exception('empty') }}{% endif %}
{%- if m.content|length > 0 %}{{ m.content }}{% endif %}{{ m.tool_calls[0].function.name }}
{%- endfor %}"""
    turn = {"role": "assistant", "tool_calls": [CALL], **content}
    assert render(source, [turn]).text == "f"


def test_a_template_cannot_leave_the_sandbox():
    for source in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ strftime_now.__globals__.os }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ 1 + 'a' }}",
    ):
        with pytest.raises(UserError, match="the chat template"):
            render(source, [{"role": "user", "content": "x"}])
    assert render("{{ ''.__class__ }}").text == ""


def test_a_damaged_template_is_refused():
    with pytest.raises(UserError, match=r"here: this is no chat template: Expected an expression"):
        ChatTemplate("{% if %}{% endif %}", {}, "here")
    with pytest.raises(UserError, match="template_date is 'May'"):
        ChatTemplate("", {}, "here").at("May")


def test_the_template_of_a_model_is_found(tmp_path):
    assert ChatTemplate.of_model(tmp_path) is None
    several = [
        {"name": "default", "template": "a{{ eos_token }}"},
        {"name": "rag", "template": "b"},
    ]
    settings = {"chat_template": several, "eos_token": {"content": "</s>"}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<pad>"}))
    assert tokens_of(tmp_path) == {"eos_token": "</s>", "pad_token": "<pad>"}
    assert ChatTemplate.of_model(tmp_path).render([]).text == "a</s>"
    assert ChatTemplate.of_model(tmp_path, "rag").render([]).text == "b"
    with pytest.raises(UserError, match="no template 'x', but default, rag"):
        ChatTemplate.of_model(tmp_path, "x")
    (tmp_path / "chat_template.jinja").write_text("c\n")
    assert ChatTemplate.of_model(tmp_path).render([]).text == "c"
