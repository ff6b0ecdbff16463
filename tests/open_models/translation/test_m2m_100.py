"""Tests M2M-100 and NLLB-MoE from their files to translations and back."""

import json

import jax.export
import numpy as np
import pytest
import safetensors.numpy

import lingvo_gshard as gshard
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.wings.export.decoder import DecoderSettings
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from tests.open_models.test_both_ways import digests
from tests.open_models.translation import models, test_tokenizers

DENSE = "m2m_100, shared and scaled table, language first"
EXPERTS = "nllb-moe, experts in every second and fourth layer"
LANGUAGES = ("input.source_language = 'de'", "input.target_language = 'en'")


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Returns (published directory, the run) of an M2M-100 for German to English."""
    folder = tmp_path_factory.mktemp("m2m")
    ids = test_tokenizers.write_m2m(folder / "tokenizer")
    models.write(folder / "model", DENSE, vocab_size=len(ids) + 108)
    for name in ("vocab.json", "sentencepiece.bpe.model", "tokenizer_config.json"):
        (folder / "tokenizer" / name).rename(folder / "model" / name)
    gshard.import_model(folder / "model", folder / "run", length=24, settings=LANGUAGES)
    return folder / "model", gshard.load(folder / "run")


def test_an_export_equals_what_was_imported(imported, tmp_path):
    source, run = imported
    found = run.export(tmp_path / "out", "huggingface")
    assert digests(tmp_path / "out") == digests(source)
    assert {"vocab.json", "sentencepiece.bpe.model", "tokenizer_config.json"} <= set(found.files)


def test_texts_begin_with_their_languages(imported):
    source, run = imported
    run.model  # noqa: B018  loads the tokenizer
    ids = json.loads((source / "vocab.json").read_text())
    german, english = len(ids) + 16, len(ids) + 18
    pair = Row("de", "die Datei", "the file")
    (batch,), too_long = run.input.pack_rows([pair])
    assert not too_long
    text = run.input.source_vocabulary.encode("die Datei")
    assert batch["source_ids"][0, : len(text) + 2].tolist() == [german, *text, 2]
    text = run.input.target_vocabulary.encode("the file")
    # The token of the language is predicted, that before it is not.
    assert batch["target_inputs"][0, : len(text) + 2].tolist() == [2, english, *text]
    assert batch["target_labels"][0, : len(text) + 2].tolist() == [english, *text, 2]


def test_languages_can_be_changed(imported):
    _, run = imported
    run.model  # noqa: B018  loads the tokenizer
    first = run.input.source_vocabulary.source_start[0] - 16

    def begin():
        return run.input.source_vocabulary.source_start, run.input.target_vocabulary.target_start

    run.input.use_languages(target="zu")
    assert begin() == ((first + 16,), (2, first + 99))
    run.input.use_languages(source="af", target="en")
    assert begin() == ((first,), (2, first + 18))
    run.input.use_languages(source="de")
    assert begin() == ((first + 16,), (2, first + 18))
    with pytest.raises(ValueError, match="target_language=zuu: the model has no such language"):
        run.input.use_languages(target="zuu")


@pytest.mark.slow
def test_an_imported_model_translates(imported):
    _, run = imported
    (found,) = run.translate(["die Datei"], beam_size=2, most_tokens=4)
    request = run.translator().request([5])
    assert "__" not in found
    assert request.source == (*run.input.source_vocabulary.source_start, 5, 2)
    assert request.given == run.input.target_vocabulary.target_start
    facts = run.decoder.engine.facts
    assert (facts.bos_id, *facts.forced_ids) == request.given and facts.pad_id == 1


def test_experts_are_scaled_by_what_training_keeps():
    values = models.case_of(EXPERTS).values | {"model_type": "nllb-moe"}
    task = experiment_of(PublishedConfig(values, "config.json")).task
    assert task.encoder.moe.router.scale == pytest.approx(0.8)
    assert (task.encoder.moe_every, task.decoder.moe_every) == (2, 4)
    assert task.positions.first_position == 2 and task.positions.reaches_base


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"second_expert_policy": "random"}, "second_expert_policy is 'random', which is not sup"),
        ({"router_dtype": "bfloat16"}, "router_dtype is 'bfloat16', which is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False, which is not supported"),
        ({"activation_function": "tanh"}, "activation_function is 'tanh', which is not supported"),
    ],
)
def test_what_is_not_supported_is_refused(values, message):
    known = models.case_of(EXPERTS).values | {"model_type": "nllb-moe"}
    with pytest.raises(ValueError) as error:
        experiment_of(PublishedConfig(known | values, "config.json"))
    assert message in str(error.value)


def test_a_wrong_tensor_is_refused(tmp_path):
    tensors = models.write(tmp_path / "model", EXPERTS)
    name = "model.encoder.layers.1.ffn.experts.expert_2.fc1.weight"
    tensors[name] = np.zeros((3, 4), np.float32)
    safetensors.numpy.save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ValueError, match=r"expert_2\.fc1\.weight is \(3, 4\); \(64, 48\) was"):
        gshard.import_model(tmp_path / "model", tmp_path / "run")


@pytest.mark.slow
def test_an_exported_program_translates_as_the_run_does(imported, tmp_path):
    _, run = imported
    options = DecodingOptions(beam_size=2, most_tokens=5)
    settings = DecoderSettings(options=options, rows=(2,), lengths=(24,))
    run.export(tmp_path / "out", "stablehlo", settings)
    facts = json.loads((tmp_path / "out" / "model.json").read_text())
    stored = safetensors.numpy.load_file(tmp_path / "out" / "weights.safetensors")
    program = jax.export.deserialize(
        bytearray((tmp_path / "out" / facts["programs"][0]["file"]).read_bytes())
    )
    texts = ["die Datei", "das Fenster wird geschlossen"]
    ids = np.full((2, 24), facts["pad"], np.int32)
    for row, text in zip(ids, texts, strict=True):
        source = [*facts["source_start"], *run.input.source_vocabulary.encode(text), facts["eos"]]
        row[: len(source)] = source
    found, scores = program.call(*(stored[name] for name in facts["weights"]), ids)
    translations = run.translator(options).translate(texts)
    assert list(map(run.input.target_vocabulary.decode, np.asarray(found))) == translations.texts
    np.testing.assert_allclose(scores, [best[0].score for best in translations.best], rtol=1e-4)
