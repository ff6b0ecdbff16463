# tests: wings/serving/endpoints/tool_calls.py, wings/serving/endpoints/chat.py
"""Tests calls of functions in answers: each published format, whole and token by token."""

import json
import types

import pytest

from lingvo_gshard.wings.fine_tuning.conversations.chat_template import ChatTemplate
from lingvo_gshard.wings.inference.requests import Hypothesis, NewTokens
from lingvo_gshard.wings.serving.endpoints.chat import ChatBody, _Chat
from lingvo_gshard.wings.serving.endpoints.tool_calls import format_of, types_in
from lingvo_gshard.wings.serving.errors import RequestError
from tests.fine_tuning.conversations.chat_forms import FORMS, Form
from tests.fine_tuning.conversations.test_chat_forms import vocabulary_of

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "array"}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"properties": PROPERTIES}}}
]
OSLO, ROME = {"city": "Oslo ü"}, {"city": "Rome", "days": [1, {"a": "}"}]}
MESSAGES = [{"role": "user", "content": "Hi"}]


def written(name, arguments, key="arguments"):
    return json.dumps({"name": name, key: arguments})


# Text before the calls, and the calls as models of the family write them.
HERMES = "".join(f"<tool_call>\n{written('weather', a)}\n</tool_call>\n" for a in (OSLO, ROME))
LLAMA = "; ".join(written("weather", a, "parameters") for a in (OSLO, ROME))
MISTRAL = f"[TOOL_CALLS] [{written('weather', OSLO)}, {written('weather', ROME)}]"
MISTRAL_NEW = "".join(f"[TOOL_CALLS]weather[ARGS]{json.dumps(a)}" for a in (OSLO, ROME))
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
DEEPSEEK_CALLS = DEEPSEEK.format(
    "\n".join(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{json.dumps(a)}\n```<｜tool▁call▁end｜>"
        for a in (OSLO, ROME)
    )
)
DEEPSEEK_NEW = DEEPSEEK.format(
    "".join(
        f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{json.dumps(a)}<｜tool▁call▁end｜>"
        for a in (OSLO, ROME)
    )
)
KIMI = (
    "<|tool_calls_section_begin|>"
    + "".join(
        f"<|tool_call_begin|>functions.weather:{i}<|tool_call_argument_begin|>{json.dumps(a)}"
        "<|tool_call_end|>"
        for i, a in enumerate((OSLO, ROME))
    )
    + "<|tool_calls_section_end|>"
)
GEMMA = (
    '<|tool_call>call:weather{city:<|"|>Oslo ü<|"|>}<tool_call|>'
    '<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:[1,{a:<|"|>}<|"|>}]}<tool_call|>'
)


def tagged(call, argument, begin="", end="", between="\n"):
    """Returns both calls with a tag for each argument, as templates of transformers print them."""
    texts = []
    for arguments in (OSLO, ROME):
        values = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in arguments.items()
        }
        texts.append(call.format(between.join(argument.format(key, values[key]) for key in values)))
    return begin + "\n".join(texts) + end


QWEN_CODER = tagged(
    "<tool_call>\n<function=weather>\n{}\n</function>\n</tool_call>",
    "<parameter={}>\n{}\n</parameter>",
)
GLM = tagged(
    "<tool_call>weather\n{}\n</tool_call>",
    "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>",
)
GLM_NEW = tagged(
    "<tool_call>weather{}</tool_call>",
    "<arg_key>{}</arg_key><arg_value>{}</arg_value>",
    between="",
)
MINIMAX = tagged(
    '<invoke name="weather">\n{}\n</invoke>',
    '<parameter name="{}">{}</parameter>',
    "<minimax:tool_call>\n",
    "\n</minimax:tool_call>",
)
DSML = tagged(
    '<｜DSML｜invoke name="weather">\n{}\n</｜DSML｜invoke>',
    '<｜DSML｜parameter name="{}">{}</｜DSML｜parameter>',
    "<｜DSML｜function_calls>\n",
    "\n</｜DSML｜function_calls>",
)
for key, is_text in (("city", "true"), ("days", "false")):
    DSML = DSML.replace(f'name="{key}"', f'name="{key}" string="{is_text}"')
TAGGED = [
    ("<tool_call><function=", "I look.\n", QWEN_CODER),
    ("<tool_call><arg_key>", "", GLM),
    ("<tool_call><arg_key>", "I look.", GLM_NEW),
    ("<minimax:tool_call>", "", MINIMAX),
    ("<｜DSML｜function_calls>", "I look.\n\n", DSML),
]
CALLS = [
    *TAGGED,
    ("<|tool_calls_section_begin|>", "I look.", KIMI),
    ("<|tool_call>", "I look.", GEMMA),
    ("<tool_call>", "Let me see.\n", HERMES),
    ("<|python_tag|>", "", LLAMA),
    ("<|python_tag|>", "", f"<|python_tag|>{LLAMA}"),
    ("[TOOL_CALLS]", "", MISTRAL),
    ("[TOOL_CALLS]", "I look.", MISTRAL_NEW),
    ("<｜tool▁calls▁begin｜>", "I look.", DEEPSEEK_CALLS),
    ("<｜tool▁calls▁begin｜>", "", DEEPSEEK_NEW),
]


def served(directory, marker, is_special=False):
    """Returns a model that has a tokenizer of bytes, and a template that prints tools."""
    source = "{{ tools | tojson if tools else '' }}{{ messages | tojson }}{# " + marker + " #}"
    # Half of the families have special tokens as marks.
    form = (
        Form(user=marker, answer="[ARGS]", prompt="", ends=("</s>",))
        if is_special
        else FORMS["glm 4"]
    )
    facts = types.SimpleNamespace(most_positions=10_000)
    published = types.SimpleNamespace(options=lambda base, given: base)
    return types.SimpleNamespace(
        name="m",
        vocabulary=vocabulary_of(form, directory),
        template=ChatTemplate(source, {}, "here"),
        engine=types.SimpleNamespace(facts=facts),
        published=published,
    )


def answered(model, text, **fields):
    """Returns the message and the parts of an answer with a text, and both finish reasons."""
    chat = _Chat(model, ChatBody(messages=MESSAGES, **{"tools": TOOLS, **fields}))
    tokens = tuple(model.vocabulary.encode(text))
    found = Hypothesis(tokens, (0.0,) * len(tokens), 0.0, "stop")
    (choice,) = chat.complete([[found]])["choices"]
    (growing,) = chat.growing()
    streamed = "".join(
        part["choices"][0]["delta"].get("content", "")
        for token in tokens
        if (part := chat.new_part(0, growing, NewTokens(0, (token,), (0.0,))))
    )
    streamed += growing.add((), is_last=True)
    last = chat.part(0, "", "stop", calls=growing.calls)
    return choice, streamed, last["choices"][0]["delta"].get("tool_calls")


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize(("marker", "before", "calls"), CALLS)
def test_calls_come_back_parsed(marker, before, calls, is_special, tmp_path):
    choice, streamed, parts = answered(served(tmp_path, marker, is_special), before + calls)
    message = choice["message"]
    assert message["content"] == (before.strip() or None)
    assert choice["finish_reason"] == "tool_calls"
    assert streamed == before
    assert [part["index"] for part in parts] == [0, 1]
    for found in (message["tool_calls"], parts):
        functions = [call["function"] for call in found]
        assert [function["name"] for function in functions] == ["weather"] * 2
        assert [json.loads(function["arguments"]) for function in functions] == [OSLO, ROME]
        assert all(call["type"] == "function" and call["id"].isalnum() for call in found)
        assert len({call["id"] for call in found}) == 2


@pytest.mark.parametrize(("marker", "before", "calls"), CALLS)
def test_other_texts_stay_as_they_are(marker, before, calls, tmp_path):
    model = served(tmp_path, marker)
    for text in ("It is warm.", "a < b [TOOL] {x}", '{"a": 1}', "<tool_", "[TOOL_", "{"):
        choice, streamed, parts = answered(model, text)
        assert (choice["message"]["content"], streamed, parts) == (text, text, None)
        assert choice["finish_reason"] == "stop"
    plain = answered(model, before + calls, tools=None)
    assert (
        plain[0]["message"]["content"]
        == plain[1]
        == model.vocabulary.text_of(model.vocabulary.encode(before + calls))
    )


def test_formats_that_are_unknown_are_left_alone():
    assert format_of("{{ messages }}") is None


@pytest.mark.parametrize(("marker", "before", "calls"), TAGGED)
def test_calls_that_were_cut_off_are_text(marker, before, calls, tmp_path):
    model = served(tmp_path, marker)
    for length in (len(calls) - 5, len(calls) - 22, calls.rindex("city") + 3):
        text = before + calls[:length]
        choice, streamed, parts = answered(model, text)
        assert choice["message"]["content"] == text == streamed and parts is None


def test_values_in_tags_have_the_declared_types():
    types = types_in([{"function": {"name": "f", "parameters": {"properties": DECLARED}}}])
    (found,) = [form for form in [format_of("<function=")] if form]
    body = "".join(f"<parameter={key}>\n{VALUES[key][0]}\n</parameter>\n" for key in VALUES)
    calls = found.calls(f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>", types)
    assert calls == [("f", {key: value for key, (_, value) in VALUES.items()})]


def test_quotes_and_braces_within_gemmas_texts_are_text():
    (found,) = [form for form in [format_of("<|tool_call>")] if form]
    said = 'a "b" {c:1, d:2}\n\\'
    text = f'<|tool_call>call:f.g{{x:<|"|>{said}<|"|>,y:{{z:true,w:[null,-2.5]}}}}<tool_call|>'
    assert found.calls(text, {}) == [("f.g", {"x": said, "y": {"z": True, "w": [None, -2.5]}})]
    assert found.calls("<|tool_call>call:f{}<tool_call|>", {}) == [("f", {})]
    assert found.calls('<|tool_call>call:f{x:<|"|>a', {}) == []


# Schemas, then texts in the tags with the values that they stand for.
DECLARED = {
    "zip": {"type": "string"},
    "none": {"type": ["string", "null"]},
    "n": {"type": "number"},
}
VALUES = {
    "zip": ("0150", "0150"),
    "none": ("7", "7"),
    "n": ("-2.5", -2.5),
    "yes": ("True", True),
    "no": ("false", False),
    "code": ("def f():\n    return '<b>'\n", "def f():\n    return '<b>'\n"),
    "empty": ("", ""),
    "object": ('{"a": [1]}', {"a": [1]}),
}


@pytest.mark.parametrize("tools", [[], [{}], [{"function": 1}], [{"function": {"name": "f"}}]])
def test_odd_declarations_have_no_types(tools):
    assert all(types == {} for types in types_in(tools).values())


def test_tools_that_the_template_does_not_print_are_an_error(tmp_path):
    model = served(tmp_path, "")
    model.template = ChatTemplate("{{ messages | tojson }}", {}, "here")
    with pytest.raises(RequestError, match="'m' writes no tools") as error:
        _Chat(model, ChatBody(messages=MESSAGES, tools=TOOLS))
    assert error.value.field == "tools"
    _Chat(model, ChatBody(messages=MESSAGES))


def test_arguments_of_earlier_calls_are_objects_unless_the_template_wants_texts(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    model = served(tmp_path, "")
    for source, expected in (
        ("{{ messages[1].tool_calls[0].function.arguments | tojson }}", '{"x": 1}'),
        ("{{ messages[1].tool_calls[0].function.arguments + '!' }}", '{"x": 1}!'),
    ):
        model.template = ChatTemplate(source, {}, "here")
        (request,) = _Chat(model, ChatBody(messages=messages)).requests
        assert model.vocabulary.text_of(request.given) == expected
    assert call["function"]["arguments"] == '{"x": 1}'
