# tests: wings/fine_tuning/conversations/encoding.py, wings/fine_tuning/conversations/examples.py
# tests: wings/fine_tuning/conversations/answers.py
"""Tests which tokens the loss counts, against transformers and by hand."""

import json

import numpy as np
import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.wings.fine_tuning.conversations.chat_template import ChatTemplate
from lingvo_gshard.wings.fine_tuning.conversations.encoding import (
    ANSWERS,
    EVERYTHING,
    LAST,
    Encoder,
)
from lingvo_gshard.wings.fine_tuning.conversations.examples import example_of, pair_of
from lingvo_gshard.wings.preparation.vocabularies.published_vocabulary import PublishedVocabulary
from tests.fine_tuning.conversations import chat_models
from tests.fine_tuning.conversations.test_chat_template import CONVERSATIONS, TOKENS, ask
from tests.open_models.published import CONFIG

# With marks of their own, and the same templates without, whose answers are found.
PAIRS = {"llama3_training": "llama3", "qwen2_5_training": "qwen2_5", "phi3_training": "phi3"}
MORE_TOKENS = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|user|>", "<|assistant|>")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "model"
    chat_models.write(directory)
    return PublishedVocabulary(directory)


def encoded(vocabulary, fields, learned=ANSWERS):
    template = ChatTemplate.of_model(vocabulary.directory)
    found = Encoder(vocabulary, template, learned).encode(example_of(fields))
    return found.ids.tolist(), found.counts.tolist()


def test_answers_count_and_questions_do_not(vocabulary):
    fields = {"messages": chat_models.turns("w6 w7", "w8 w9", "w11", "w12")}
    # <s> w4 w6 w7 <end> w5 w8 w9 <end> w4 w11 <end> w5 w12 <end>
    ids = [1, 4, 6, 7, 3, 5, 8, 9, 3, 4, 11, 3, 5, 12, 3]
    counts = [0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]
    assert encoded(vocabulary, fields) == (ids, counts)
    assert encoded(vocabulary, fields, LAST) == (ids, [0] * 13 + [1, 1])
    assert encoded(vocabulary, fields, EVERYTHING) == (ids, [0] + [1] * 14)
    fields["messages"][1]["weight"] = 0
    assert encoded(vocabulary, fields) == (ids, [0] * 13 + [1, 1])
    # A null is as if the field were missing.
    fields["messages"][1]["weight"] = None
    assert encoded(vocabulary, fields) == (ids, counts)


def test_of_a_prompt_with_a_completion_the_completion_counts(vocabulary):
    fields = {"prompt": "w6 w7", "completion": " w8"}
    assert encoded(vocabulary, fields) == ([1, 6, 7, 8, 2], [0, 0, 0, 1, 1])
    assert encoded(vocabulary, {"prompt": "", "completion": "w8"}) == ([1, 8, 2], [0, 1, 1])
    turns = chat_models.turns("w6", "w7", "w8", "w9")
    fields = {"prompt": turns[:3], "completion": turns[3:]}
    ids = [1, 4, 6, 3, 5, 7, 3, 4, 8, 3, 5, 9, 3]
    assert encoded(vocabulary, fields) == (ids, [0] * 11 + [1, 1])


def test_a_template_that_rewrites_turns_needs_the_last_one(vocabulary):
    source = """{%- for m in messages %}
{{- m.role[0] }} {{ m.content if m.role == 'user' or loop.last else 'w4' }} <end> {% endfor %}
{%- if add_generation_prompt %}a {% endif %}"""
    template = ChatTemplate(source, {}, "here")
    example = example_of({"messages": chat_models.turns("w6", "w7", "w8", "w9")})
    with pytest.raises(UserError, match=r"turn 2 in another way .*input\.learn = \"last\""):
        Encoder(vocabulary, template, ANSWERS).encode(example)
    assert Encoder(vocabulary, template, LAST).encode(example).counts.tolist()[-2:] == [1, 1]
    with pytest.raises(UserError, match=r"no chat template; input\.template names"):
        Encoder(vocabulary, None, ANSWERS).encode(example)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"text": "a"}, "no 'messages', and no 'prompt' with 'completion': there are 'text'"),
        ({"messages": "Hi"}, "'messages' is 'Hi'; a list of turns was expected"),
        ({"messages": [{"role": "user"}, "Hi"]}, r"messages\[1\] is 'Hi'; an object with 'role'"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\]\.content is 5; a text"),
        ({"messages": [{"role": "user", "weight": 0.5}]}, r"weight is 0\.5; 0 or 1"),
        ({"messages": [{"role": "user", "tool_calls": 5}]}, "tool_calls is 5; a list of objects"),
        ({"prompt": "a", "completion": "b", "tools": 5}, "'tools' is 5; a list of objects"),
        (
            {"prompt": "a", "completion": "b", "tools": "[" * 9999},
            r"'tools' is .*, which is no JSON",
        ),
        ({"prompt": "a", "completion": "b", "chat_template_kwargs": [1]}, "an object was expected"),
        ({"messages": chat_models.turns("Hi")}, "no turn of the role 'assistant' to learn"),
        ({"prompt": "a", "completion": ""}, "'completion' is empty"),
        ({"prompt": "a", "completion": chat_models.turns("b")}, "one of .* is a text"),
    ],
)
def test_wrong_fields_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        example_of(fields)


def test_a_pair_of_conversations_shares_its_first_turns():
    first, *_ = turns = chat_models.turns("Hi", "Hello")
    other = [first, {"role": "assistant", "content": "Go"}]
    chosen, rejected = pair_of({"chosen": turns, "rejected": other})
    assert chosen.prompt == rejected.prompt == (first,)
    assert (chosen.completion, rejected.completion) == ((turns[1],), (other[1],))
    with pytest.raises(UserError, match="are equal"):
        pair_of({"prompt": "a", "chosen": "b", "rejected": "b"})
    with pytest.raises(UserError, match="no 'rejected'"):
        pair_of({"prompt": "a", "chosen": "b"})
    with pytest.raises(UserError, match="do not begin with the same turn"):
        pair_of({"chosen": turns, "rejected": turns[1:]})


def write_byte_model(directory, special):
    """Writes a tokenizer of bytes with special tokens, and a config that names the last ones."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    directory.mkdir()
    pieces = ["<unk>", "<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [("H", "e"), ("l", "l"), ("Ġ", "s"), ("Ċ", "Ċ")]
    names = {piece: i for i, piece in enumerate([*pieces, *("".join(m) for m in merges)])}
    made = tokenizers.Tokenizer(models.BPE(names, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*TOKENS.values(), *special])
    made.save(str(directory / "tokenizer.json"))
    ends = [made.token_to_id(t) for t in ("</s>", "<|im_end|>", "<|eot_id|>", "<|end|>")]
    config = CONFIG | {"eos_token_id": ends}
    (directory / "config.json").write_text(json.dumps(config))


def test_ids_and_marks_are_those_of_transformers(tmp_path):
    write_byte_model(tmp_path / "model", MORE_TOKENS)
    vocabulary = PublishedVocabulary(tmp_path / "model")
    talks = [messages for messages in CONVERSATIONS[:3] if messages[-1]["role"] == "assistant"]
    cases = [
        {"template": name, "messages": m, "spans": True, "tokenizer": str(tmp_path / "model")}
        for name in PAIRS
        for m in talks
    ]
    plain = [{"template": PAIRS[case["template"]], "messages": []} for case in cases]
    answers = ask([*cases, *plain], tmp_path)
    for case, answer, found in zip(cases, answers, answers[len(cases) :], strict=False):
        example = example_of({"messages": case["messages"]})
        template = ChatTemplate(answer["source"], TOKENS, "marked")
        marked = Encoder(vocabulary, template, ANSWERS).encode(example)
        assert marked.ids.tolist() == answer["ids"]
        np.testing.assert_array_equal(marked.counts, answer["marks"])
        # The plain template has the same text; its answers are found, up to the end of a turn.
        template = ChatTemplate(found["source"], TOKENS, "plain")
        searched = Encoder(vocabulary, template, ANSWERS).encode(example)
        assert searched.ids.tolist() == answer["ids"], case["template"]
        differing = searched.counts != marked.counts
        # trl counts the line's end after the end of a turn in some templates.
        assert set(np.asarray(answer["ids"])[differing]) <= set(vocabulary.encode("\n"))
