"""Tests what a training checks before it reads data."""

import pytest

import lingvo_gshard as gshard
from lingvo_gshard.core import UserError, objects
from lingvo_gshard.data import EmbeddedCorpus


def test_the_listed_languages_are_those_of_the_corpus():
    reader = EmbeddedCorpus.params().instantiate()
    listed = objects.text_beside(gshard.api.training.__file__, "embedded_languages.txt").split()
    assert listed == sorted({row.language for row in reader.rows("train")})


@pytest.mark.parametrize("wrong", ["jp", ("es", "pt_br")])
def test_a_wrong_language_is_refused_before_data_is_read(wrong, tmp_path, monkeypatch):
    def read(self, split):
        raise AssertionError(f"{split} is read")

    monkeypatch.setattr(EmbeddedCorpus, "rows", read)
    params = gshard.experiment("translation.quickstart")
    params.input.languages = (wrong,) if isinstance(wrong, str) else wrong
    with pytest.raises(UserError, match=r"input\.languages: the corpus has no '(jp|pt_br)'"):
        gshard.train(params, tmp_path / "run")
    assert not (tmp_path / "run").exists()
