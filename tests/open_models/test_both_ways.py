# tests: wings/open_models/importing.py, wings/open_models/exporting.py
# tests: wings/open_models/weight_mapping.py, wings/open_models/fused.py
# tests: wings/open_models/streamed.py, api/importing.py
"""Tests import and export: a model computes what it was published to, and comes back as it was."""

import hashlib
import pathlib

import numpy as np
import pytest
import rich.console
import safetensors.numpy

import lingvo_gshard as gshard
from lingvo_gshard.core import context
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.wings.open_models.exporting import ExportSource
from tests.open_models import llama_reference, published

QUIET = rich.console.Console(quiet=True)
IDS = [1, 5, 7, 4, 9, 20, 11, 5]


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Returns (published directory, its tensors, the run)."""
    folder = tmp_path_factory.mktemp("imported")
    tensors = published.write(folder / "model", shards=2)
    gshard.import_model(folder / "model", folder / "run", length=16)
    return folder / "model", tensors, gshard.load(folder / "run")


def digests(directory):
    """Returns name -> (type, digest) of all tensors in a directory's files."""
    found = {}
    for file in pathlib.Path(directory).glob("*.safetensors"):
        for name, value in safetensors.numpy.load_file(file).items():
            found[name] = str(value.dtype), hashlib.sha256(value.tobytes()).hexdigest()
    return found


def logits_of(run, ids):
    """Returns the logits [L,V] that a run's model gives for one text."""
    row = tf.constant([ids], tf.int32)
    batch = {"target_inputs": row, "target_segments": tf.ones_like(row)}
    batch["target_positions"] = tf.range(len(ids))[None]
    theta = run.model.theta.transform(tf.convert_to_tensor)
    with context.scope(training=False):
        return run.model.task.logits(theta, batch).numpy()[0]


def test_logits_are_those_of_the_published_model(imported):
    _, tensors, run = imported
    expected = llama_reference.logits(tensors, IDS)
    np.testing.assert_allclose(logits_of(run, IDS), expected, atol=2e-4, rtol=2e-4)


def test_the_run_has_what_the_model_was_published_with(imported):
    _, tensors, run = imported
    assert run.params.name == "open_models.llama" and run.step == 0
    run.model  # noqa: B018  loads the tokenizer
    vocabulary = run.input.vocabulary
    assert vocabulary.encode("w5 w7 <end>") == [5, 7, 3]
    assert (vocabulary.begin([5]), vocabulary.begin([])) == ((1, 5), (1,))
    assert (vocabulary.end_ids, vocabulary.eos_id, vocabulary.bos_id) == ((2, 3), 2, 1)
    assert vocabulary.decode([1, 5, 7, 3, 9]) == "w5 w7"
    assert run.params.task.vocabulary_size == published.VOCABULARY == vocabulary.size
    count = sum(value.size for value in tensors.values())
    assert sum(np.size(w) for w in run.model.theta.flatten()) == count


def test_an_export_equals_what_was_imported_in_every_bit(imported, tmp_path):
    source, _, run = imported
    exported = run.export(tmp_path / "out", "huggingface")
    assert digests(tmp_path / "out") == digests(source)
    kept = {"config.json", "tokenizer.json"}
    assert set(exported.files) == kept | {"model.safetensors"}
    assert all((tmp_path / "out" / f).read_bytes() == (source / f).read_bytes() for f in kept)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_come_back(dtype, tmp_path):
    import ml_dtypes  # noqa: F401  registers bfloat16

    published.write(tmp_path / "model", dtype=dtype)
    gshard.import_model(tmp_path / "model", tmp_path / "run")
    gshard.load(tmp_path / "run").export(tmp_path / "out", "huggingface")
    assert digests(tmp_path / "out") == digests(tmp_path / "model")


def source_of(run):
    """Returns what an export of a run reads."""
    with run.open_checkpoints() as (_, trainer):
        step = run.logdir.checkpoints / str(run.step)
        return ExportSource.open(step, trainer.evaluated_part, run.params, trainer)


def test_large_models_become_several_files_with_an_index(imported, tmp_path):
    source, _, run = imported
    (tmp_path / "out").mkdir()
    source_of(run).write(tmp_path / "out", file_bytes=1000)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 3000 for file in files)
    assert digests(tmp_path / "out") == digests(source)
    gshard.import_model(tmp_path / "out", tmp_path / "again")


def test_a_tied_softmax_is_no_tensor(tmp_path):
    tensors = published.write(tmp_path / "model", tie_word_embeddings=True)
    file = tmp_path / "model" / "model.safetensors"
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens"):
        gshard.import_model(tmp_path / "model", tmp_path / "run")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    safetensors.numpy.save_file(tensors, file)
    gshard.import_model(tmp_path / "model", tmp_path / "run")
    gshard.load(tmp_path / "run").export(tmp_path / "out", "huggingface")
    assert digests(tmp_path / "out").keys() == digests(tmp_path / "model").keys() - {
        "lm_head.weight"
    }


def test_a_damaged_checkpoint_is_not_exported(imported, tmp_path):
    _, _, run = imported
    source = source_of(run)
    digests_of_item = source.checkpoint.record.digests["theta"]
    name = "decoder.layers.body[0].self_attention.w_key"
    digests_of_item[name] += 1
    with pytest.raises(ValueError, match=r"w_key has other contents than were saved"):
        source.write(tmp_path)


@pytest.mark.slow
def test_training_goes_on_from_an_imported_model(tmp_path):
    published.write(tmp_path / "model")
    settings = (
        "step.optimizer.learning_rate_factors = {'*norm': 1.0, '*': 0}",
        "step.schedule.warmup_steps = 1",
        "step.schedule.learning_rate = 1e-2",
        "input.batch_rows = 2",
    )
    gshard.import_model(tmp_path / "model", tmp_path / "run", length=8, settings=settings)
    params = gshard.load(tmp_path / "run").params
    outcome = gshard.train(params, tmp_path / "run", steps=3, console=QUIET)
    assert outcome.step == 3
    gshard.load(tmp_path / "run").export(tmp_path / "out", "huggingface")
    before, after = digests(tmp_path / "model"), digests(tmp_path / "out")
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name in before if "norm" in name}
