"""Tests what becomes of generation_config.json: fields of options, and what is left out."""

import json

import pytest

from lingvo_gshard.wings.inference.options import DRAWING, DecodingOptions
from lingvo_gshard.wings.inference.published_settings import PublishedSettings

LLAMA = {
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 40,
    "repetition_penalty": 1.1,
    "max_new_tokens": 30,
    "transformers_version": "5.0",
}


def test_settings_of_drawing():
    settings = PublishedSettings.of(LLAMA)
    assert settings.left_out == {}
    options = settings.options(DRAWING, {})
    assert options == DecodingOptions(
        beam_size=1,
        temperature=0.6,
        top_p=0.9,
        top_k=40,
        repetition_penalty=1.1,
        most_tokens=30,
    )
    assert settings.options(DRAWING, {"top_k": 5, "temperature": 1.5}) == DecodingOptions(
        beam_size=1,
        temperature=1.5,
        top_p=0.9,
        top_k=5,
        repetition_penalty=1.1,
        most_tokens=30,
    )
    greedy = DecodingOptions(beam_size=1, temperature=0.0, most_tokens=30)
    assert settings.options(DRAWING, {"temperature": 0.0}) == greedy
    beam = DecodingOptions(beam_size=3, temperature=0.0, most_tokens=30)
    assert settings.options(DRAWING, {"beam_size": 3}) == beam


def test_the_least_length_counts_the_end():
    """Transformers forbids the end before `min_new_tokens`, and we before as many with the end."""
    found = {"min_new_tokens": 3, "do_sample": False}
    assert PublishedSettings.of(found).fields["least_tokens"] == 4
    found["max_new_tokens"] = 3
    assert PublishedSettings.of(found).fields["least_tokens"] == 3
    found["min_new_tokens"] = 0
    assert PublishedSettings.of(found).fields["least_tokens"] == 0


def test_settings_of_a_search():
    found = {"num_beams": 5, "length_penalty": 0.8, "top_k": 40, "early_stopping": True}
    settings = PublishedSettings.of(found | {"no_repeat_ngram_size": 3, "typical_p": 1.0})
    assert settings.options(DecodingOptions(), {}) == DecodingOptions(
        beam_size=5, length_exponent=0.8
    )
    assert settings.left_out.keys() == {"top_k", "early_stopping", "no_repeat_ngram_size"}
    assert settings.left_out["early_stopping"] == "it is unknown here"
    assert "do_sample is false" in settings.left_out["top_k"]
    assert settings.options(DRAWING, {"temperature": 0.7}).beam_size == 1


def test_greedy_and_other_settings():
    settings = PublishedSettings.of({"do_sample": False, "suppress_tokens": [4, 5]})
    greedy = DecodingOptions(beam_size=1, temperature=0.0, forbidden_tokens=(4, 5))
    assert settings.options(DRAWING, {}) == greedy
    both = PublishedSettings.of({"do_sample": True, "num_beams": 4})
    assert both.left_out == {"num_beams": "do_sample is true, which needs one beam"}
    assert PublishedSettings.of({"eos_token_id": 2, "_from_model_config": True}).fields == {}
    # A row of 32 keeps 30 tokens free only if a beginning keeps less than half of it.
    assert PublishedSettings.of(LLAMA).within(60).fields["most_tokens"] == 30
    assert "most_tokens" not in PublishedSettings.of(LLAMA).within(59).fields


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"top_p": 3}', r"generation_config.json: `top_p=3`: a number above 0"),
        ('{"temperature": "hot"}', r"temperature is 'hot'; a number was expected"),
        ('{"suppress_tokens": 3}', r"suppress_tokens is 3; a list of ids was expected"),
        ("{", r"generation_config.json is no JSON"),
        ("[1]", r"generation_config.json is no JSON object"),
    ],
)
def test_wrong_files_are_refused(text, message, tmp_path):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        PublishedSettings.read(tmp_path)


def test_nulls_and_absent_files(tmp_path):
    assert PublishedSettings.read(tmp_path) == PublishedSettings()
    text = json.dumps({"temperature": None, "top_k": 7})
    (tmp_path / "generation_config.json").write_text(text)
    assert PublishedSettings.read(tmp_path).fields == {"top_k": 7}
