# tests: core/files/objects.py, core/files/stores.py, wings/object_stores/buckets.py
# tests: wings/object_stores/connections.py, wings/object_stores/problems.py
"""Tests that files of buckets are read and written as those of a disk are."""

import gzip
import os

import pytest

from lingvo_gshard.core.files import objects, stores
from lingvo_gshard.core.files.stores import BucketError
from lingvo_gshard.wings.object_stores import buckets, connections, problems


@pytest.fixture(params=["gcs", pytest.param("s3", marks=pytest.mark.slow), "disk"])
def top(request, tmp_path):
    """Gives a folder that is not there yet, in a bucket and on a disk."""
    if request.param == "disk":
        return str(tmp_path / "folder")
    return f"{request.getfixturevalue(request.param).bucket}/{request.node.originalname}"


def test_files_and_folders_as_on_a_disk(top):
    assert not objects.exists(top) and objects.names(top) == [] and objects.find(top) == {}
    with pytest.raises(FileNotFoundError):
        objects.read_bytes(f"{top}/a")
    with pytest.raises(FileNotFoundError):
        objects.open_to_read(f"{top}/a")
    objects.make_folder(f"{top}/d/e")
    objects.write_bytes(f"{top}/a", b"hello")
    objects.write_bytes(f"{top}/d/e/f.tsv", b"12345")
    assert objects.exists(top) and objects.exists(f"{top}/d") and objects.exists(f"{top}/a")
    assert objects.is_file(f"{top}/a") and not objects.is_file(f"{top}/d")
    assert objects.size_of(f"{top}/a") == 5 and objects.size_of(f"{top}/b") is None
    assert objects.names(top) == ["a", "d"]
    found = objects.find(top)
    assert {name: entry.size for name, entry in found.items()} == {"a": 5, "d/e/f.tsv": 5}
    assert objects.glob(f"{top}/d/*/*.tsv") == [f"{top}/d/e/f.tsv"]
    objects.write_bytes(f"{top}/a", b"world")
    assert objects.read_bytes(f"{top}/a") == b"world"
    assert objects.find(top)["a"] != found["a"]
    objects.remove(f"{top}/a")
    objects.remove(f"{top}/a")
    assert objects.names(top) == ["d"]
    objects.remove_tree(top)
    objects.remove_tree(top)
    assert not objects.exists(top)


def test_a_stream_reads_the_same_bytes(top):
    content = os.urandom(1_000_000)
    objects.make_folder(top)
    objects.write_bytes(f"{top}/x.gz", gzip.compress(content))
    with objects.open_to_read(f"{top}/x.gz") as file, gzip.open(file) as stream:
        assert stream.read() == content
    with objects.open_to_read(f"{top}/x.gz") as file:
        assert file.seek(-8, os.SEEK_END) > 0
        assert int.from_bytes(file.read()[4:], "little") == len(content)


@pytest.mark.slow
def test_copies(folder, tmp_path):
    (tmp_path / "f").write_bytes(b"12")
    buckets.upload(tmp_path / "f", f"{folder}/d/f")
    assert objects.local_file(f"{folder}/d/f").read_bytes() == b"12"
    assert (objects.local_folder(folder) / "d" / "f").read_bytes() == b"12"
    assert objects.local_folder(tmp_path) == tmp_path
    buckets.copy_tree(f"{folder}/d", f"{folder}/e")
    assert list(objects.find(folder)) == ["d/f", "e/f"]
    with pytest.raises(FileNotFoundError):
        buckets.upload(tmp_path / "g", f"{folder}/g")


@pytest.mark.slow
def test_answers_of_a_busy_service_are_repeated(folder, emulator, capsys):
    problems._told.clear()
    emulator.faults.failing = 3
    objects.write_bytes(f"{folder}/a", b"1")
    assert objects.read_bytes(f"{folder}/a") == b"1"
    assert not emulator.faults.failing


@pytest.mark.slow
def test_a_service_that_stays_busy_ends_in_a_sentence(folder, emulator, capsys, monkeypatch):
    problems._told.clear()
    monkeypatch.setenv(problems.LIMIT, "3")
    emulator.faults.failing = 1000
    with pytest.raises(
        BucketError, match=f"{emulator.bucket} does not answer as it should.*(503|Unavail)"
    ):
        objects.read_bytes(f"{folder}/a")
    assert capsys.readouterr().err.count("trying again") <= 1


@pytest.mark.slow
def test_a_bucket_that_is_gone(folder, emulator):
    emulator.faults.is_gone = True
    with pytest.raises(BucketError, match=f"there is no bucket {emulator.bucket}; check"):
        objects.exists(folder)
    with pytest.raises(BucketError, match=f"there is no bucket {emulator.bucket}; check"):
        objects.write_bytes(f"{folder}/a", b"")


@pytest.mark.slow
def test_a_token_that_expired(folder, emulator):
    emulator.faults.refuses = True
    with pytest.raises(BucketError, match="refuses access .* check the credentials"):
        objects.read_bytes(f"{folder}/a")


def test_urls_that_name_no_bucket():
    with pytest.raises(ValueError, match="hdfs:// is not supported; give a local path, gs:// and"):
        stores.path_of("hdfs://x/y")
    with pytest.raises(ValueError, match="the name of a bucket is missing"):
        stores.path_of("s3:///run")


def test_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert stores.absolute("a/b") == tmp_path / "a" / "b"
    found = stores.absolute("s3://bucket/run/") / "d"
    assert os.fspath(found) == "s3://bucket/run/d" and stores.is_bucket(found)
    assert connections.split(found) == ("s3", "bucket", "run/d")
