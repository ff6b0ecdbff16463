# tests: wings/fine_tuning/conversations/chat_template.py
# tests: wings/fine_tuning/conversations/template_program.py
# tests: wings/fine_tuning/conversations/conversation_input.py
# tests: wings/fine_tuning/conversations/preference_input.py
"""Fuzzes conversations: rows of any JSON, and templates that do what they should not.

A row is an example, or it is left out and counted, or refused with file and line. A template writes
a text, or a UserError says in a sentence why not. Both take a bounded time.
"""

import copy
import json
import random
import time

import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.wings.fine_tuning.conversations import template_program
from lingvo_gshard.wings.fine_tuning.conversations.chat_template import ChatTemplate
from lingvo_gshard.wings.fine_tuning.conversations.conversation_input import ConversationInput
from lingvo_gshard.wings.fine_tuning.conversations.preference_input import PreferenceInput
from tests.fine_tuning.conversations import chat_models

FEW, MANY = 300, 6_000
DEEP = 600
# Values in JSON, each of which takes the place of every field.
ODD = (
    *("null", "true", "0", "5", "-1", "0.5", "1e999", "NaN", "-Infinity", '""', '"x"', "[]", "{}"),
    *('"[[["', '"{"', '"[5]"', '"[{}]"', "[1]", "[null]", "[[]]", '[{"a": 1}]', '{"a": 1}'),
    *('"\\ud800"', '"\\u0000"', '{"\\ud800": "\\ud800"}', "9" * 400, "9" * 5000),
    *("[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "[" * 9999 + "]" * 9999),
    json.dumps("[" * 9999),
    json.dumps("[" * DEEP + "]" * DEEP),
)
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "w6"}}}
TURN = {"role": "assistant", "content": "w8", "weight": 1, "tool_calls": [CALL], "name": "w9"}
EXAMPLES = (
    {
        "messages": [*chat_models.turns("w6"), TURN],
        "tools": [CALL],
        "chat_template_kwargs": {"enable_thinking": True},
    },
    {"conversation": chat_models.turns("w6", "w7")},
    {"prompt": "w6", "completion": "w7"},
    {"prompt": chat_models.turns("w6"), "completion": [TURN]},
)
PAIRS = (
    {"prompt": "w6", "chosen": "w7", "rejected": "w8"},
    {"chosen": [*chat_models.turns("w6"), TURN], "rejected": chat_models.turns("w6", "w9")},
    {"prompt": chat_models.turns("w6"), "chosen": [TURN], "rejected": chat_models.turns("", "w9")},
)
# Writes every field that rows have, and the tools, as published templates do.
TEMPLATE = """
{%- for tool in tools or [] %}{{ tool.function.name | tojson }}{% endfor %}
{%- for m in messages %}{{- 'w4 ' if m.role == 'user' else 'w5 ' }}{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}
{{- ' <end> ' }}
{%- endfor %}{%- if add_generation_prompt %}{{- 'w5 ' }}{%- endif %}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rows")
    chat_models.write(directory / "model")
    (directory / "own.jinja").write_text(TEMPLATE)
    return directory


def paths_in(value, path=()):
    """Yields the path of each value in JSON."""
    yield path
    if isinstance(value, list):
        value = dict(enumerate(value))
    for key, each in value.items() if isinstance(value, dict) else ():
        yield from paths_in(each, (*path, key))


def changed(row, path, odd: str) -> str:
    """Returns a row in JSON with another value at a path."""
    if not path:
        return odd
    found = copy.deepcopy(row)
    place = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = "HERE"
    return json.dumps(found).replace('"HERE"', odd)


def check(folder, kind, rows: list[str], good) -> None:
    """Reads rows, each with a good one after it, and compares what is kept and counted.

    Raises:
      AssertionError: a row is lost, or an error has no file and line.
    """
    p = kind.params().set(length=64, batch_rows=2, template=str(folder / "own.jinja"))
    file = folder / "rows.jsonl"
    p.corpus.train = p.corpus.dev = (str(file),)
    p.cleaning.drop_duplicates = False
    p.corpus.on_bad_row = "skip"
    file.write_text("\n".join([*rows, json.dumps(good)]) + "\n", encoding="utf-8")
    found = p.instantiate()
    found.load_vocabularies(folder / "model")
    began = time.monotonic()
    kept = len(found.table("train"))
    assert kept >= 1 and kept + sum(found.report.dropped.values()) == len(rows) + 1
    list(found.evaluation_batches("dev"))
    assert time.monotonic() - began < 60
    # A refused row is named. Only rows that are not read, or not written, end the reading.
    p.corpus.on_bad_row = "refuse"
    for row in rows[:: max(len(rows) // 20, 1)]:
        file.write_text(f"{json.dumps(good)}\n{row}\n", encoding="utf-8")
        found = p.instantiate()
        found.load_vocabularies(folder / "model")
        try:
            found.table("train")
        except UserError as error:
            assert "rows.jsonl:2: " in str(error) and len(str(error)) < 800


@pytest.mark.parametrize(
    "kind, examples", [(ConversationInput, EXAMPLES), (PreferenceInput, PAIRS)]
)
def test_each_field_takes_each_value(folder, kind, examples):
    rows = [
        changed(row, path, odd) for row in examples for path in paths_in(row) for odd in ODD[:-6]
    ]
    rows += [changed(row, (name,), odd) for row in examples for name in row for odd in ODD[-6:]]
    check(folder, kind, rows, examples[1])


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind, examples", [(ConversationInput, EXAMPLES), (PreferenceInput, PAIRS)]
)
def test_rows_that_are_changed_at_random_are_read_or_left_out(folder, kind, examples, count):
    draw = random.Random(count)
    rows = []
    for _ in range(count):
        text = json.dumps(draw.choice(examples))
        for _ in range(draw.randint(1, 3)):
            begin = draw.randrange(len(text))
            end = min(begin + draw.randint(0, 20), len(text))
            text = text[:begin] + draw.choice((*ODD[:24], "", "{", "]", ",")) + text[end:]
        rows.append(text.replace("\n", " ").strip() or "{}")
    check(folder, kind, rows, examples[1])


# What a template should not do -> what is said.
TEMPLATES = {
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}": "RecursionError",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ range(10 ** 9) }}": "OverflowError",
    "{{ [1, 'a'] | sort }}": "TypeError",
    "{{ messages[0].x.y }}": "no attribute 'x'",
    "{% include 'x' %}": "TypeError",
    "{{ strftime_now('\\ud800') }}": "UnicodeEncodeError",
    "{{ raise_exception('\\ud800' * 9999) }}": r"\\ud800",
    "{% for i in [1] %}" * 22 + "{% endfor %}" * 22: "SyntaxError",
    "{% if true %}" * 120 + "{% endif %}" * 120: "IndentationError",
    "{{ " + "[" * 3000 + "]" * 3000 + " }}": "RecursionError",
    "{% break %}": "SyntaxError",
    "a" * 300_000: "has 300,000 characters",
    "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}": (
        "longer than"
    ),
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}": (
        "longer than"
    ),
    "{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}": "writes more than",
    "{{ 'a' * 10 ** 15 }}": "more than",
    "{{ [1] * 10 ** 10 }}": "more than",
    "{{ 9 ** 99999 }}": "a number that is too large",
    "{{ 'a' | center(10 ** 10) }}": "too large",
    "{{ 'a'.ljust(10 ** 10) }}": "too large",
    "{{ range(99999) | join('a' * 100000) }}": "too large",
    "{{ ('a' * 100000).replace('a', 'a' * 100000) }}": "too large",
    "{{ '%9999999999d' % 1 }}": "width",
    "{{ '%9999999999d' | format(1) }}": "width",
    "{{ '{:>9999999999}'.format(1) }}": "width",
    "{{ '{:>{}}'.format(1, 10 ** 10) }}": "width",
    "{% set n = namespace(s='a') %}{% for i in range(64) %}{% set n.s = n.s ~ n.s %}{% endfor %}": (
        "more than"
    ),
    "{% set n = namespace(s='a') %}{% for i in range(64) %}{% set n.s = n.s + n.s %}{% endfor %}": (
        "more than"
    ),
}


@pytest.mark.parametrize("source", TEMPLATES, ids=lambda source: source[:40])
def test_a_template_that_misbehaves_is_told_in_a_sentence(source, monkeypatch):
    monkeypatch.setattr(template_program, "SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(UserError, match=TEMPLATES[source]) as error:
        ChatTemplate(source, {}, "here").render(chat_models.turns("a", "b"))
    assert time.monotonic() - began < 5
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)
    assert str(error.value).encode("utf-8")


PARTS = (
    *(
        "{% for m in messages %}",
        "{% endfor %}",
        "{% if m %}",
        "{% else %}",
        "{% endif %}",
        "{{ m }}",
    ),
    *(
        "{{ m.content }}",
        "{{ m.role ~ 1 }}",
        "{% generation %}",
        "{% endgeneration %}",
        "{{ loop }}",
    ),
    *(
        "{% set ns = namespace(a=1) %}",
        "{% set ns.a = ns.a * 99 %}",
        "{{ ns.a | tojson }}",
        "{{",
        "}}",
    ),
    *(
        "{% macro f(x) %}",
        "{% endmacro %}",
        "{{ f(m) }}",
        "{{ f() }}",
        "{{ 1 / 0 }}",
        "{{ m | sum }}",
    ),
    *(
        "{% set m = [m, m] %}",
        "{{ m | length }}",
        "{{ [] | first }}",
        "{{ m[-1] }}",
        "{% continue %}",
    ),
    *(
        "{{ range(9) | list }}",
        "{{ m.split('a') }}",
        "{% filter upper %}",
        "{% endfilter %}",
        "{#",
        "#}",
    ),
    *(
        "{{ 'a' * 99 }}",
        "{{ cycler(1).next() }}",
        "{{ self }}",
        "{% block b %}",
        "{% endblock %}",
        "\0",
    ),
    *(
        "{% call f() %}",
        "{% endcall %}",
        "{% raw %}",
        "{% endraw %}",
        "{{ '%d' % m }}",
        "{{ m.x.y }}",
    ),
)


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_templates_of_random_parts_write_or_say_why_not(count, monkeypatch):
    monkeypatch.setattr(template_program, "SECONDS", 1.0)
    draw = random.Random(count)
    written = 0
    for _ in range(count):
        source = "".join(draw.choices(PARTS, k=draw.randint(1, 12)))
        began = time.monotonic()
        try:
            ChatTemplate(source, {}, "here").render(chat_models.turns("a", "b"))
            written += 1
        except UserError as error:
            assert len(str(error)) < 500, source
        assert time.monotonic() - began < 5, source
    assert written > count // 40


@pytest.mark.parametrize(
    "value",
    [
        5,
        True,
        {"a": 1},
        {"default": "x"},
        [5],
        [{}],
        [{"name": "default"}],
        ["x"],
        [{"name": [], "template": "x"}],
    ],
)
def test_a_setting_that_is_no_template_is_refused(tmp_path, value):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(UserError, match=r"chat_template in .* is of the type .*; a text was"):
        ChatTemplate.of_model(tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\xed\xa0\x80", b"{{"])
def test_a_file_that_is_no_template_is_refused(tmp_path, content):
    (tmp_path / "chat_template.jinja").write_bytes(content)
    with pytest.raises(UserError, match=r"chat_template\.jinja: this is no chat template"):
        ChatTemplate.of_model(tmp_path)


@pytest.mark.parametrize("content", [b"[" * 9999, b"\xff", b"5", b"{"])
def test_settings_that_are_no_json_are_refused(tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer_config\.json is no JSON"):
        ChatTemplate.of_model(tmp_path)
