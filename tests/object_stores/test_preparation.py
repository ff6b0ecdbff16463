# tests: wings/preparation/pipeline.py, wings/preparation/job.py, wings/object_stores/buckets.py
"""Tests preparation from a bucket into a bucket, against emulators."""

import pytest

from lingvo_gshard.core.files import objects
from lingvo_gshard.wings.object_stores import buckets
from lingvo_gshard.wings.preparation.pipeline import PrepareOptions, prepare
from tests.preparation import raw


@pytest.mark.slow
def test_a_bucket_holds_what_a_disk_would(tmp_path, folder):
    rows = raw.rows(300)
    path = raw.write_tsv(tmp_path / "pairs.tsv", rows)
    buckets.upload(path, f"{folder}/raw/pairs.tsv")
    local, _ = raw.run(tmp_path, [f"{path},name=pairs"])
    options = PrepareOptions(raw.params(tmp_path / "cache"), 2, work=str(tmp_path / "work"))
    output = f"{folder}/prepared"
    prepared = prepare(output, [f"{folder}/raw/*.tsv,name=pairs"], options)
    objects_there = objects.find(output)
    expected = raw.digests(local)
    assert objects_there.keys() == expected.keys()
    copy = tmp_path / "copy"
    for name in objects_there:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        buckets.download(f"{output}/{name}", copy / name)
    found = raw.digests(copy)
    # The manifest names the file that was read, which is in the bucket.
    assert found.pop("manifest.json") != expected.pop("manifest.json")
    assert found == expected
    assert prepare(output, [f"{folder}/raw/*.tsv,name=pairs"], options) == prepared


def test_output_in_a_bucket_needs_a_local_directory_for_work(tmp_path):
    path = raw.write_tsv(tmp_path / "pairs.tsv", raw.rows(10))
    with pytest.raises(ValueError, match="`output=gs://b/p` is in a bucket: `work` must name"):
        prepare("gs://b/p", [path])
