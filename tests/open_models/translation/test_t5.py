"""Tests T5 from its files to translations and back."""

import numpy as np
import pytest
import safetensors.numpy
import sentencepiece

import lingvo_gshard as gshard
from lingvo_gshard.data.sources.row import Row
from tests.open_models.test_both_ways import digests
from tests.open_models.translation import models


def test_what_transformers_5_writes_of_t5_1_1_is_understood():
    values = models.case_of("t5, tied and scaled softmax").values | {"model_type": "t5"}

    def task(**config):
        return gshard_task(values | config)

    assert (task().tie_softmax, task().logit_scale) == (True, 48**-0.5)
    for one in (task(tie_word_embeddings=False), task(scale_decoder_outputs=False)):
        assert (one.tie_softmax, one.logit_scale) == (False, 1.0)


def gshard_task(values):
    from lingvo_gshard.wings.open_models.config import PublishedConfig
    from lingvo_gshard.wings.open_models.experiment import experiment_of

    return experiment_of(PublishedConfig(values, "config.json")).task


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj is 'gated-tanh', which is not"),
        ({"feed_forward_proj": "half-relu"}, "feed_forward_proj is 'half-relu', which is not"),
        ({"d_model": None}, "config.json lacks d_model, which this family needs"),
        ({"is_causal": False}, "is_causal is False, which is not supported; True was expected"),
    ],
)
def test_what_is_not_supported_is_refused(values, message):
    known = models.case_of("t5, tied and scaled softmax").values | {"model_type": "t5"}
    with pytest.raises(ValueError) as error:
        gshard_task(known | values)
    assert message in str(error.value)


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_a_softmax_without_a_scale_may_share_the_table(tie_word_embeddings, tmp_path):
    """As transformers 5 saves a T5 1.1 whose two tables were tied."""
    config = {"tie_word_embeddings": tie_word_embeddings, "scale_decoder_outputs": False}
    tensors = models.write_t5(tmp_path / "model", **config)
    del tensors["lm_head.weight"]
    safetensors.numpy.save_file(tensors, tmp_path / "model" / "model.safetensors")
    gshard.import_model(tmp_path / "model", tmp_path / "run")
    theta = dict(gshard.load(tmp_path / "run").model.theta.flatten_items())
    np.testing.assert_array_equal(theta["softmax.w"], tensors["shared.weight"].T)


def test_files_with_other_names_of_the_shared_table_are_read(tmp_path):
    tensors = models.write_t5(tmp_path / "model")
    before = digests(tmp_path / "model")
    tensors["encoder.embed_tokens.weight"] = tensors["lm_head.weight"] = tensors["shared.weight"]
    bias = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    tensors[bias] = tensors["shared.weight"][:8]
    del tensors["shared.weight"]
    safetensors.numpy.save_file(tensors, tmp_path / "model" / "model.safetensors")
    gshard.import_model(tmp_path / "model", tmp_path / "run")
    gshard.load(tmp_path / "run").export(tmp_path / "out", "huggingface")
    assert digests(tmp_path / "out") == before
    assert (tmp_path / "out" / "spiece.model").read_bytes() == models.trained("t5")


def test_the_tokenizer_has_the_ids_of_the_published_model(tmp_path):
    models.write_t5(tmp_path / "model")
    gshard.import_model(tmp_path / "model", tmp_path / "run", length=16)
    run = gshard.load(tmp_path / "run")
    run.model  # noqa: B018  loads the tokenizer
    source, target = run.input.source_vocabulary, run.input.target_vocabulary
    pieces = sentencepiece.SentencePieceProcessor(model_proto=models.trained("t5"))
    count = pieces.vocab_size()
    text = "the file <extra_id_1> window"
    expected = [*pieces.encode("the file"), count + 98, *pieces.encode("window")]
    assert source.encode(text) == expected and source.size == count + 100
    assert target.decode([0, *expected, 1, 7]) == pieces.decode(
        [index for index in expected if index < count]
    )
    assert target.piece(count + 98) == "<extra_id_1>"
    assert (source.source_start, target.target_start, target.eos_id) == ((), (0,), 1)
    (batch,), _ = run.input.pack_rows([Row("de", "the file", "die Datei")])
    ids = pieces.encode("the file")
    assert batch["source_ids"][0, : len(ids) + 2].tolist() == [*ids, 1, 0]
    ids = pieces.encode("die Datei")
    assert batch["target_inputs"][0, : len(ids) + 1].tolist() == [0, *ids]
    assert batch["target_labels"][0, : len(ids) + 1].tolist() == [*ids, 1]


@pytest.mark.slow
def test_an_imported_model_translates(tmp_path):
    models.write_t5(tmp_path / "model")
    gshard.import_model(tmp_path / "model", tmp_path / "run", length=24)
    found = gshard.load(tmp_path / "run").translate(["the file"], beam_size=2, most_tokens=4)
    assert len(found) == 1 and isinstance(found[0], str)
