# tests: wings/fine_tuning/conversations/encoding.py, wings/fine_tuning/conversations/answers.py
# tests: wings/fine_tuning/conversations/chat_template.py
"""Tests which tokens the loss counts of the forms of published templates, against marks by hand."""

import dataclasses
import json
import re

import pytest

from lingvo_gshard.wings.fine_tuning.conversations.answers import end_of_turn
from lingvo_gshard.wings.fine_tuning.conversations.chat_template import ChatTemplate
from lingvo_gshard.wings.fine_tuning.conversations.encoding import ANSWERS, LAST, Encoder
from lingvo_gshard.wings.fine_tuning.conversations.examples import example_of
from lingvo_gshard.wings.preparation.vocabularies.published_vocabulary import PublishedVocabulary
from tests.fine_tuning.conversations.chat_forms import CLOSE, FORMS, MARKERS, OPEN, Form
from tests.open_models.published import CONFIG

CONTENTS = ("Hi!", "<b> Größe", "42", "a | b", "1", "user", "x\ny", "so <|")


def vocabulary_of(form: Form, directory) -> PublishedVocabulary:
    """Returns a vocabulary of bytes and of the markers of a form."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    pieces = ["<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    texts = [value for value in vars(form).values() if isinstance(value, str)]
    found = MARKERS.findall(" ".join(texts))
    made.add_special_tokens(sorted({*found, *form.ends, "<|observation|>"}))
    made.save(str(directory / "tokenizer.json"))
    ends = [made.token_to_id(token) for token in form.ends]
    (directory / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": ends}))
    return PublishedVocabulary(directory)


def talk(form: Form, rounds: int, has_system: bool, calls: bool = False) -> list[dict]:
    """Returns a conversation."""
    messages = [{"role": "system", "content": "Be kind"}] if has_system else []
    for number in range(rounds):
        question, answer = CONTENTS[2 * number], CONTENTS[2 * number + 1]
        messages.append({"role": "user", "content": question})
        if calls:
            call = {"type": "function", "function": {"name": "f", "arguments": {}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": "sunny"})
        messages.append({"role": "assistant", "content": answer})
    return messages


def talks(form: Form):
    """Yields conversations that a form can write."""
    for rounds in (1, 2, 3, 4):
        for has_system in (False, True) if form.system or form.first else (False,):
            for calls in (False, True) if form.call else (False,):
                yield talk(form, rounds, has_system, calls)
    if form.call:
        yield talk(form, 1, False, True)[:2]


def marked(vocabulary, expected: str) -> tuple[list[int], list[int]]:
    """Returns the ids of a text and 1 for those within brackets."""
    ids, counts, inside = [], [], 0
    for part in re.split(f"([{OPEN}{CLOSE}])", expected):
        if part in (OPEN, CLOSE):
            inside = int(part == OPEN)
            continue
        found = vocabulary.encode(part)
        ids, counts = ids + found, counts + [inside] * len(found)
    return ids, [0, *counts[1:]]


@pytest.mark.parametrize("name", FORMS)
def test_the_answers_and_their_ends_count_and_nothing_else(name, tmp_path):
    form = FORMS[name]
    vocabulary = vocabulary_of(form, tmp_path)
    template = ChatTemplate(form.source(), {}, name)
    for messages in talks(form):
        expected = form.expected(messages)
        ids, counts = marked(vocabulary, expected)
        found = Encoder(vocabulary, template, ANSWERS).encode(example_of({"messages": messages}))
        assert found.ids.tolist() == ids, expected
        assert found.counts.tolist() == counts, expected
        last = Encoder(vocabulary, template, LAST).encode(example_of({"messages": messages}))
        runs = _runs(counts)
        assert _runs(last.counts.tolist()) == runs[-1:], expected


def _runs(counts: list[int]) -> list[tuple[int, int]]:
    """Returns begin and end of each run of ones."""
    return [found.span() for found in re.finditer("1+", "".join(map(str, counts)))]


def test_there_are_forty_forms():
    assert len(FORMS) >= 40


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("chatml of a base model", "<|im_end|>"),
        ("phi 3 with one end", "<|end|>"),
        ("llama 3, which always begins an answer", "<|eot_id|>"),
        # Nothing but the marker of the user's turn follows an answer.
        ("glm 4", "<|user|> <|observation|>"),
        ("glm edge", "<|user|>"),
        # A marker that begins each turn is no end.
        ("nemotron mini", None),
        # <|end|> ends a thought as well, so generation goes on after it.
        ("gpt-oss", None),
        ("solar open", None),
        # Nothing follows the last answer. The end of earlier ones is an end of the model's texts.
        ("hy 3", None),
    ],
)
def test_the_server_knows_the_token_after_an_answer(name, end, tmp_path):
    form = FORMS[name]
    vocabulary = vocabulary_of(form, tmp_path)
    found = end_of_turn(vocabulary, ChatTemplate(form.source(), {}, name))
    assert [vocabulary.piece(index) for index in found] == (end.split() if end else [])


@pytest.mark.parametrize("name", ["glm 4", "glm edge"])
def test_the_next_marker_is_learned_though_the_model_does_not_list_it(name, tmp_path):
    listed, unlisted = FORMS[name], dataclasses.replace(FORMS[name], ends=("<|endoftext|>",))
    template = ChatTemplate(listed.source(), {}, name)
    for messages in talks(listed):
        example = example_of({"messages": messages})
        found = []
        for folder, form in (("listed", listed), ("unlisted", unlisted)):
            (tmp_path / folder).mkdir(exist_ok=True)
            vocabulary = vocabulary_of(form, tmp_path / folder)
            encoded = Encoder(vocabulary, template, ANSWERS).encode(example)
            found.append([(vocabulary.piece(i), c) for i, c in zip(*_lists(encoded), strict=True)])
        # The last answer ends as the model's texts do.
        assert found[1][:-1] == found[0][:-1]
        assert found[1][-1] == ("<|endoftext|>", 1)


def _lists(encoded):
    return encoded.ids.tolist(), encoded.counts.tolist()


def test_many_turns_take_time_in_proportion(tmp_path):
    form = FORMS["llama 2"]
    vocabulary = vocabulary_of(form, tmp_path)
    template = ChatTemplate(form.source(), {}, "here")
    messages = talk(form, 4, False) * 30
    ids, counts = marked(vocabulary, form.expected(messages))
    calls = []
    render = template.render
    template.render = lambda *args, **values: calls.append(1) or render(*args, **values)
    found = Encoder(vocabulary, template, ANSWERS).encode(example_of({"messages": messages}))
    assert (found.ids.tolist(), found.counts.tolist()) == (ids, counts)
    # 120 answers, found by comparing a few.
    assert len(calls) < 60
