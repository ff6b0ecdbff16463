# tests: core/files/objects.py, core/files/regular.py, data/sources/compression.py
# tests: data/sources/text.py, data/sources/tsv.py, wings/open_models/shards.py
"""Fuzzes readers of corpora, vocabularies, plans and configs with files that are hard to read.

test_readers.py changes bytes of files. Here the file is a pipe, a device or a directory, stands for
gigabytes, is one endless line, or is nested deeply. Each is an answer or a sentence, within a limit
of time and of memory.
"""

import bz2
import contextlib
import gzip
import json
import lzma
import os
import pathlib
import re
from collections.abc import Iterator

import pytest
import zstandard

from lingvo_gshard.core.files import objects
from lingvo_gshard.data.sources import compression
from lingvo_gshard.data.sources.text import TextReader
from lingvo_gshard.data.sources.tsv import TsvReader
from lingvo_gshard.wings.inference.published_settings import PublishedSettings
from lingvo_gshard.wings.open_models import shards
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.preparation.vocabularies import published_vocabulary
from tests.fuzz.odd_files import IRREGULAR
from tests.fuzz.test_readers import READERS, prepared_rows, rows_of
from tests.fuzz.within import within

SECONDS = 60
COMPRESSORS = {
    "": bytes,
    ".gz": lambda content: gzip.compress(content, 1),
    ".bz2": lambda content: bz2.compress(content, 1),
    ".xz": lambda content: lzma.compress(content, preset=0),
    ".zst": zstandard.ZstdCompressor().compress,
}
# Readers of single files of published models.
MODELS = {
    "config.json": PublishedConfig.load,
    "generation_config.json": lambda path: PublishedSettings.read(path.parent),
    "tokenizer_config.json": published_vocabulary.read_json,
    "model.safetensors": lambda path: shards.read_headers(path.parent),
    shards.INDEX_FILE: lambda path: shards.read_headers(path.parent),
}


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_refused_by_name(name, kind, tmp_path):
    reader = READERS[name]
    path = tmp_path / reader.make(tmp_path)
    path.unlink()
    IRREGULAR[kind](path)
    with within(SECONDS, (name, kind)), pytest.raises((ValueError, OSError)) as caught:
        reader.read(path)
    assert path.name in str(caught.value) or not reader.names_file


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("name", MODELS)
def test_files_of_models_that_are_no_files_are_refused(name, kind, tmp_path):
    IRREGULAR[kind](tmp_path / name)
    if (kind, name) == ("link to nothing", "generation_config.json"):
        return
    with within(SECONDS, (name, kind)):
        try:
            MODELS[name](tmp_path / name)
        except (ValueError, OSError) as error:
            assert name in str(error) or str(tmp_path) in str(error)
        else:
            # As if it were not there.
            assert kind == "link to nothing"


def test_a_substituted_process_is_refused_in_a_sentence():
    """A shell hands `<(command)` on as a pipe, which could be read only once."""
    reading, writing = os.pipe()
    os.write(writing, b"de\tHaus\thouse\n")
    os.close(writing)
    path = pathlib.Path(f"/dev/fd/{reading}")
    with within(SECONDS), pytest.raises(ValueError, match=f"{path}: this is a named pipe; a reg"):
        rows_of(TsvReader)(path)
    os.close(reading)


@contextlib.contextmanager
def little_memory(most: int = 2**28) -> Iterator[None]:
    """Checks that this process needs at most so much more memory meanwhile."""
    status = pathlib.Path("/proc/self/status")
    # Sets the peak to what is used now.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = re.search(r"VmHWM:\s*(\d+)", status.read_text())[1]
    yield
    after = re.search(r"VmHWM:\s*(\d+)", status.read_text())[1]
    assert (int(after) - int(before)) * 1024 < most


@pytest.mark.parametrize("ending", COMPRESSORS)
@pytest.mark.parametrize("use", [rows_of(TextReader), rows_of(TsvReader), prepared_rows])
def test_a_long_line_is_refused_by_its_number(use, ending, tmp_path):
    path = tmp_path / f"a.tsv{ending}"
    path.write_bytes(COMPRESSORS[ending](b"de\t" + b"x" * 2**26 + b"\ty\n"))
    refused = pytest.raises(ValueError, match=f"{path.name}:1: .*too long")
    with within(SECONDS, ending), refused:
        use(path)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("content", ["[" * 10**6, '{"a":' * 10**6, "{" + '"' * 10**6, "9" * 10**6])
def test_nested_and_endless_values_are_refused(name, content, tmp_path):
    path = tmp_path / name
    text = content.encode()
    head = len(text).to_bytes(8, "little") if name.endswith(".safetensors") else b""
    path.write_bytes(head + text)
    with within(SECONDS, name), pytest.raises(ValueError, match=name):
        MODELS[name](path)


def test_a_header_of_very_many_tensors_is_read_in_seconds(tmp_path):
    count = 300_000
    header = {
        f"layers.{k}.w": {"dtype": "F32", "shape": [1], "data_offsets": [4 * k, 4 * k + 4]}
        for k in range(count)
    }
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4 * count))
    with within(SECONDS):
        found = shards.read_headers(tmp_path)
        assert len(found) == count and found["layers.7.w"].start == 8 + len(text) + 28
        with pytest.raises(ValueError, match="x is missing; .* and 299,?996 more"):
            shards.check_tensors(found, {"x": (1,)}, (), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ending", COMPRESSORS)
def test_a_line_of_a_gigabyte_is_skipped_in_bounded_memory(ending, tmp_path):
    path = tmp_path / f"a.tsv{ending}"
    with open(path, "wb") as file:
        for content in (b"de\ta\tb\n", *[b"x" * 2**26] * 16, b"\nde\tc\td\n"):
            file.write(COMPRESSORS[ending](content))
    with within(SECONDS, ending), little_memory():
        found = rows_of(TsvReader, on_bad_row="skip")(path)
    assert [row.target for row in found] == ["b", "d"]


@pytest.mark.slow
@pytest.mark.parametrize("ending", [name for name in COMPRESSORS if name])
def test_a_small_file_that_stands_for_gigabytes_is_read_in_blocks(ending, tmp_path):
    path = tmp_path / f"zeros{ending}"
    with open(path, "wb") as file:
        for _ in range(8):
            file.write(COMPRESSORS[ending](bytes(2**27)))
    count = 0
    with within(SECONDS, ending), little_memory(), objects.open_to_read(path) as stored:
        with compression.decompressed(str(path), stored) as file:
            while block := file.read(2**20):
                count += len(block)
    assert count == 2**30
