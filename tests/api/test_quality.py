"""Tests of the comparison of precisions."""

import dataclasses

import pytest

import lingvo_gshard as gshard
from lingvo_gshard.api.decoding import quality
from lingvo_gshard.api.decoding.quality import Quality, table_of
from lingvo_gshard.wings.evaluation import text_scores
from lingvo_gshard.wings.export.decoder import DecoderSettings


@pytest.mark.slow
def test_precisions_are_compared_by_the_translations_of_rows(trained_logdir):
    options = gshard.DecodingOptions(beam_size=1, most_tokens=6)
    with gshard.load(trained_logdir) as run:
        trained, int8 = run.compare_precisions(("trained", "int8"), "test", 1000, options)
        rows = run.input.rows("test")
        texts = run.translate([row.source for row in rows], options)
    assert (trained.precision, int8.precision) == ("trained", "int8")
    assert trained.rows == int8.rows == len(rows)
    expected = text_scores.score(texts, [row.target for row in rows])
    assert (trained.chrf, trained.bleu) == pytest.approx((expected.chrf, expected.bleu))
    assert trained.equal == 1.0 and 0 < int8.equal <= 1
    assert int8.mebibytes < 0.6 * trained.mebibytes
    assert int8.tokens_per_second > 0


def test_all_precisions_are_of_the_checkpoint_that_was_chosen(trained_logdir):
    run = gshard.load(trained_logdir, checkpoint="newest")
    other = quality._with_precision(run, "int8")
    assert (other.precision, other.checkpoint) == ("int8", "newest")
    assert other.logdir.path == run.logdir.path and other.options == run.options


def test_scores_stand_beside_what_they_differ_by():
    first = Quality("trained", 12.0, 500, 44.0, 18.5, 2000.0, 1.0)
    second = dataclasses.replace(
        first, precision="int8", mebibytes=3.0, chrf=43.5, bleu=18.75, equal=0.9
    )
    _, row = table_of([first, second]).rows
    assert row == ("int8", "3.0", "43.50 (-0.50)", "18.75 (+0.25)", "90.0%", "2,000")


def test_a_precision_is_named_where_it_does_not_apply(trained_logdir, tmp_path):
    run = gshard.load(trained_logdir)
    with pytest.raises(ValueError, match="`precision` does not apply"):
        run.export(tmp_path / "out", "safetensors", DecoderSettings(precision="int8"))
    with pytest.raises(ValueError, match=r"precision.*int16.*unknown.*'int8'"):
        gshard.load(trained_logdir, precision="int16")
    with pytest.raises(ValueError, match="unknown"):
        DecoderSettings(precision="int16")
