# tests: wings/open_models/importing.py, wings/open_models/exporting.py
# tests: wings/fine_tuning/starting.py
"""Fine-tuning from end to end: a model of transformers is imported, trained, and taken back."""

import os

import numpy as np
import pytest
import rich.console

import lingvo_gshard as gshard
from benchmarks.parity.cases import CASES
from benchmarks.parity.peer import LIBRARIES, Peer
from benchmarks.peer_python import find_python
from lingvo_gshard.core import context
from lingvo_gshard.core.lazy import tf

QUIET = rich.console.Console(quiet=True)
LENGTH, STEPS = 48, 60
SETTINGS = (
    "input.batch_rows = 16",
    "step.schedule.learning_rate = 3e-3",
    "step.schedule.warmup_steps = 10",
    "run.log_every_steps = 1",
)


def write_byte_tokenizer(directory):
    """Writes a tokenizer whose ids after the first three are bytes."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    pieces = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(directory / "tokenizer.json"))


def loss_of(run, ids):
    """Returns the cross-entropy per token of the rows [rows,length], each one text."""
    batch = {"target_inputs": ids[:, :-1], "target_labels": ids[:, 1:]}
    batch["target_segments"] = np.ones_like(ids[:, 1:])
    batch["target_positions"] = np.tile(np.arange(ids.shape[1] - 1), (len(ids), 1))
    tensors = {name: tf.constant(array, tf.int32) for name, array in batch.items()}
    theta = run.model.theta.transform(tf.convert_to_tensor)
    with context.scope(training=False):
        _, metrics = run.model.task.loss(theta, tensors)
    return float(metrics["cross_entropy"][0])


@pytest.mark.slow
def test_losses_are_equal_on_both_sides(tmp_path):
    python = find_python(os.environ.get("PEERS_PYTHON"), LIBRARIES)
    if not python:
        pytest.skip("transformers is not installed, and PEERS_PYTHON names no Python with it")
    case = next(case for case in CASES if case.model_type == "olmoe")
    logdir, output, rows = tmp_path / "run", tmp_path / "tuned", tmp_path / "ids.npy"
    with Peer(python, [case], tmp_path) as peer:
        peer.make(0)
        source = peer.directory(0)
        write_byte_tokenizer(source)
        gshard.import_model(source, logdir, length=LENGTH, settings=SETTINGS)
        run = gshard.load(logdir)
        text = "The file could not be opened because it is used by another program. " * 4
        encoded = run.decoder.input.vocabulary.encode(text)[: 4 * LENGTH]
        ids = np.array(encoded, np.int64).reshape(4, LENGTH)
        np.save(rows, ids)
        before = loss_of(run, ids)
        assert before == pytest.approx(peer.loss(0, source, rows), abs=1e-4)
        assert gshard.train(run.params, logdir, steps=STEPS, console=QUIET).finished
        tuned = gshard.load(logdir)
        after = loss_of(tuned, ids)
        assert after < before - 1
        tuned.export(output, "huggingface")
        assert after == pytest.approx(peer.loss(0, output, rows), abs=1e-4)
