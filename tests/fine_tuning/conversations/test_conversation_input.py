# tests: wings/fine_tuning/conversations/conversation_input.py
# tests: wings/fine_tuning/conversations/reader.py, wings/fine_tuning/conversations/examples.py
"""Tests reading, packing and masking of conversations, and the loss against a NumPy loop."""

import functools
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import rich.console

import lingvo_gshard as gshard
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.wings.fine_tuning.conversations.conversation_input import ConversationInput
from lingvo_gshard.wings.fine_tuning.conversations.encoding import Encoder
from lingvo_gshard.wings.fine_tuning.conversations.examples import example_of
from tests.fine_tuning.conversations import chat_models
from tests.open_models import llama_reference

QUIET = rich.console.Console(quiet=True)
CLASS = "@lingvo_gshard.wings.fine_tuning.conversations.conversation_input.ConversationInput"
LENGTH, ROWS = 24, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chats")
    chat_models.write(directory / "model")
    chat_models.write_lines(directory / "chats.jsonl")
    return directory


def conversations(folder, *files, **settings):
    """Returns an input of files of a folder with the vocabulary of the model there."""
    p = ConversationInput.params().set(length=LENGTH, batch_rows=ROWS, **settings)
    p.corpus.train = p.corpus.dev = tuple(str(folder / file) for file in files)
    found = p.instantiate()
    found.load_vocabularies(folder / "model")
    return found


def pieces_of(batch):
    """Returns (inputs, labels, marks) of each segment of a batch, as tuples."""
    found = []
    for row in range(len(batch["target_segments"])):
        segments = batch["target_segments"][row]
        for segment in range(1, segments.max() + 1):
            inside = segments == segment
            assert batch["target_positions"][row][inside].tolist() == [*range(inside.sum())]
            names = ("target_inputs", "target_labels", "target_marks")
            found.append(tuple(tuple(batch[name][row][inside].tolist()) for name in names))
        for name, array in batch.items():
            assert not array[row][segments == 0].any(), name
    return found


def expected_pieces(found):
    """Returns the segments of CONVERSATIONS, one by one."""
    encoder = Encoder(found.vocabulary, found.template, "answers")
    encoded = [encoder.encode(example_of(row)) for row in chat_models.CONVERSATIONS]
    return [(tuple(e.ids[:-1]), tuple(e.ids[1:]), tuple(e.counts[1:])) for e in encoded]


def test_each_conversation_is_a_segment_of_its_own(folder):
    found = conversations(folder, "chats.jsonl")
    batches = list(found.evaluation_batches("dev"))
    assert set(batches[0]) == set(ConversationInput.batch_specs(found.p))
    packed = [piece for batch in batches for piece in pieces_of(batch)]
    assert sorted(packed) == sorted(expected_pieces(found))
    trained = [piece for _ in range(6) for piece in pieces_of(next(found.train_batches(1)))]
    assert set(trained) <= set(packed)


def test_parquet_files_have_the_same_conversations(folder):
    rows = [row for row in chat_models.CONVERSATIONS if "messages" in row]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "chats.parquet")
    chat_models.write_lines(folder / "some.jsonl", rows)
    lines, columns = (
        [p for b in conversations(folder, file).evaluation_batches("dev") for p in pieces_of(b)]
        for file in ("some.jsonl", "chats.parquet")
    )
    assert sorted(lines) == sorted(columns) and len(lines) == len(rows)


def test_long_conversations_are_left_out_or_cut(folder):
    long = {"messages": chat_models.turns("w6 " * LENGTH, "w7", "w8", "w9")}
    late = {"messages": chat_models.turns("w6 " * 8, "w7 " * LENGTH)}
    chat_models.write_lines(folder / "long.jsonl", [long, late, *chat_models.CONVERSATIONS])
    found = conversations(folder, "long.jsonl")
    assert len(found.table("train")) == len(chat_models.CONVERSATIONS)
    assert found.report.dropped["more tokens than a row has positions"] == 2
    assert "input.length = " in found.notes[-1]
    found = conversations(folder, "long.jsonl", truncate=True)
    # Of the first one, no answer is left.
    assert found.report.dropped["no token counts in the loss"] == 1
    longest = max(len(i) for b in found.evaluation_batches("dev") for i, *_ in pieces_of(b))
    assert longest == LENGTH


def test_bad_lines_are_refused_with_their_place_or_skipped(folder):
    lines = ['{"messages": []}', "[1]", "{", json.dumps(chat_models.CONVERSATIONS[0])]
    (folder / "bad.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"bad\.jsonl:1: no example: 'messages' is \[\]"):
        conversations(folder, "bad.jsonl").table("train")
    p = conversations(folder, "bad.jsonl").p.copy()
    p.corpus.on_bad_row = "skip"
    found = p.instantiate()
    found.load_vocabularies(folder / "model")
    assert len(found.table("train")) == 1
    assert found.report.dropped == {"no example": 1, "no JSON object": 2}
    with pytest.raises(UserError, match=r"learn is 'answer'; expected 'answers'"):
        conversations(folder, "bad.jsonl", learn="answer")
    with pytest.raises(UserError, match="start the run with `init_from`"):
        ConversationInput.params().set(corpus=found.p.corpus).instantiate().table("train")


@functools.cache
def nats(folder, ids, counts):
    """Returns the cross-entropy of the counted ids by the NumPy model."""
    tensors = chat_models.published.tensors()
    logits = llama_reference.logits(tensors, list(ids))[:-1]
    log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    chosen = logits[np.arange(len(logits)), np.array(ids[1:])]
    return float(((log_z - chosen) * np.array(counts[1:])).sum())


def settings_of(folder, *more):
    return (
        f"input = {CLASS}",
        f"input.corpus.train = ('{folder}/chats.jsonl',)",
        f"input.corpus.dev = ('{folder}/chats.jsonl',)",
        f"input.length = {LENGTH}",
        f"input.batch_rows = {ROWS}",
        *more,
    )


def test_the_loss_is_that_of_a_loop_over_the_answers(folder):
    run = gshard.import_model(
        folder / "model", folder / "run", length=LENGTH, settings=settings_of(folder)
    )
    assert run.parameters
    run = gshard.load(folder / "run")
    scores = run.evaluate("dev")
    encoder = Encoder(run.input.vocabulary, run.input.template, "answers")
    encoded = [encoder.encode(example_of(row)) for row in chat_models.CONVERSATIONS]
    tokens = sum(int(e.counts.sum()) for e in encoded)
    total = sum(nats(folder, tuple(e.ids.tolist()), tuple(e.counts.tolist())) for e in encoded)
    assert scores.tokens == tokens
    assert scores.cross_entropy == pytest.approx(total / tokens, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("task.lora.rank = 2",)], ids=["full", "adapters"])
def test_eight_devices_learn_what_one_does(folder, tmp_path, more):
    settings = ("input.batch_rows = 8", "step.schedule.warmup_steps = 1", *more)
    params = gshard.open_model(
        folder / "model", length=LENGTH, settings=settings_of(folder, *settings)
    )
    meshes = {
        "one": {},
        "tensor_fsdp": {"mesh": "data=4,model=2", "strategy": "tensor_fsdp"},
        "fsdp": {"mesh": "data=8", "strategy": "fsdp"},
    }
    losses = [
        gshard.train(
            params,
            tmp_path / name,
            init_from=folder / "model",
            steps=3,
            console=QUIET,
            **options,
        ).metrics["loss"]
        for name, options in meshes.items()
    ]
    assert losses == pytest.approx([losses[0]] * len(meshes), rel=1e-5)


def test_the_template_is_saved_beside_the_vocabulary(folder, tmp_path):
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }} <end> {% endfor %}")
    found = conversations(folder, "chats.jsonl", template=str(tmp_path / "own.jinja"))
    found.save_vocabularies(tmp_path / "saved")
    (tmp_path / "own.jinja").unlink()
    found.load_vocabularies(tmp_path / "saved")
    turns = chat_models.turns("w6", "w7")
    assert found.template.render(turns).text == "w6 <end> w7 <end> "
    with pytest.raises(UserError, match=r"input\.template: .*missing\.jinja"):
        missing = conversations(folder, "chats.jsonl", template="missing.jinja")
        missing._directory = None
        _ = missing.template
