"""Tests which messages a chat model offers to try."""

import pytest

from lingvo_gshard.wings.fine_tuning.conversations.conversation_input import ConversationInput
from lingvo_gshard.wings.fine_tuning.conversations.example_prompts import example_prompts_of
from lingvo_gshard.wings.preparation.published_inputs import PublishedTextInput
from tests.fine_tuning.conversations import chat_models

MESSAGES = "- messages: [{role: system, content: w9}, {role: user, content: w6 w7}]"
CARDS = {
    f"---\nlicense: mit\nwidget:\n{MESSAGES}\n- text: ' w11 '\n---\n# A model\n": ("w6 w7", "w11"),
    f"---\r\nwidget:\r\n{MESSAGES}\r\n---\r\n": ("w6 w7",),
    "---\nwidget:\n" + "- text: w\n" * 9 + "---\n": ("w",) * 4,
    "---\nwidget: [5, {messages: 3}, {messages: [7]}, {text: 2}, {text: ''}]\n---\n": (),
    "---\nwidget:\n- text: " + "x" * 201 + "\n---\n": (),
    "---\nwidget: 5\n---\n": (),
    "---\n- [\n---\n": (),
    "---\nwidget: " + "[" * 5000 + "\n---\n": (),
    "no metadata": (),
    "": (),
}


@pytest.mark.parametrize(("card", "expected"), CARDS.items(), ids=map(str, range(len(CARDS))))
def test_the_card_of_a_published_model_lists_messages(card, expected, tmp_path):
    folder = tmp_path / "model"
    chat_models.write(folder)
    (folder / "README.md").write_text(card, encoding="utf-8", newline="")
    input_ = PublishedTextInput.params().instantiate()
    input_.load_vocabularies(folder)
    assert example_prompts_of(input_) == expected


def test_params_come_before_the_card(tmp_path):
    folder = tmp_path / "model"
    chat_models.write(folder)
    params, found = ConversationInput.params(), {}
    params.corpus.train = (str(chat_models.write_lines(tmp_path / "chats.jsonl")),)
    for given in ((), ("w12", "w13")):
        input_ = params.copy().set(examples=given).instantiate()
        input_.load_vocabularies(folder)
        found[given] = example_prompts_of(input_)
        # There is no card so far.
        (folder / "README.md").write_text(next(iter(CARDS)), encoding="utf-8")
    assert found == {(): (), ("w12", "w13"): ("w12", "w13")}
