# tests: data/sources/tsv.py, wings/preparation/formats/gettext.py
# tests: wings/preparation/formats/moses.py, data/sources/text.py
# tests: wings/preparation/prepared/manifest.py, data/vocabularies/files.py
# tests: core/config/params_text.py, wings/planning/plan/plan.py, wings/planning/planned_training.py
# tests: training/run/checkpoint/run_item.py
"""Fuzzes the readers of files: damaged content is read, or refused in a sentence with the file.

Each reader is given files that were cut, of which bytes or words were changed, or of which parts
were doubled. An error of another type than ValueError, or one that names no file, is a fault of the
reader.
"""

import dataclasses
import gzip
import lzma
import pathlib
import random
import shutil
from collections.abc import Callable

import msgspec
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from lingvo_gshard.core.config import params_text
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.data.sources.text import TextReader
from lingvo_gshard.data.sources.tsv import TsvReader
from lingvo_gshard.training.run.checkpoint import run_item
from lingvo_gshard.training.run.checkpoint.run_item import read_run
from lingvo_gshard.wings.planning import planned_training
from lingvo_gshard.wings.planning.plan import plan as plan_file
from lingvo_gshard.wings.preparation.formats.gettext import GettextReader
from lingvo_gshard.wings.preparation.formats.moses import MosesReader
from lingvo_gshard.wings.preparation.prepared import manifest
from lingvo_gshard.wings.preparation.vocabularies import others
from tests import tiny
from tests.open_models import published
from tests.planning.example_plan import example_plan
from tests.planning.example_search import example_search
from tests.preparation import raw
from tests.preparation.formats.test_mo import catalog
from tests.preparation.prepared import corpora

# Changed files of each reader in `make test`, and in `make test-all`.
FEW, MANY = 40, 1_500
NESTED = b"[" * 20_000
ODD = (b"null", b"-1", b"1e999", b'"x"', b"[]", b"{}", b"true", b"9" * 400, b"\xff", b"\0", b'"')


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader, and the file that it is fuzzed with.

    Attributes:
      make: writes the file, and others that it needs, into a directory; returns its name.
      read: reads the file, or what it belongs to.
      names_file: whether an error must have the file's name.
    """

    make: Callable[[pathlib.Path], str]
    read: Callable[[pathlib.Path], object]
    names_file: bool = True


def written(name: str, content: bytes) -> Callable[[pathlib.Path], str]:
    """Returns a function that writes a file of this name and content."""

    def make(directory: pathlib.Path) -> str:
        (directory / name).write_bytes(content)
        return name

    return make


def rows_of(reader: type, **values: object) -> Callable[[pathlib.Path], object]:
    """Returns a function that reads a file as the training data, and refuses bad rows."""

    def read(path: pathlib.Path) -> object:
        files = {"train": str(path), "dev": str(path), **values}
        return reader.params().set(**files).instantiate().rows("train")

    return read


def moses_rows(path: pathlib.Path) -> object:
    other = path.with_suffix(".en")
    other.write_bytes(LINES.encode())
    prefix = str(path.with_suffix(""))
    return MosesReader.params().set(train=prefix, dev=prefix).instantiate().rows("train")


def prepared_rows(path: pathlib.Path) -> object:
    output = path.parent / "out"
    shutil.rmtree(output, ignore_errors=True)
    return raw.run(path.parent, [f"{path},language=de"], output="out")


def parquet(directory: pathlib.Path) -> str:
    columns = {"source": ["Haus", "Hund"] * 40, "target": ["house", "dog"] * 40}
    pyarrow.parquet.write_table(pyarrow.table(columns), directory / "rows.parquet")
    return "rows.parquet"


def prepared(directory: pathlib.Path) -> str:
    corpora.prepare(directory, {("de", "web"): (40, 5)})
    return manifest.FILE


def checkpoint(directory: pathlib.Path) -> str:
    item = directory / "7" / "run"
    item.mkdir(parents=True)
    record = run_item.RunRecord(7, {"index": 3}, run_item.versions(), {"theta": {"w": 5}})
    run_item.write_run(item, record, "name : x\n", None)
    return "7/run/run.json"


def published_tokenizer(directory: pathlib.Path) -> str:
    published.write_tokenizer(directory)
    return "tokenizer.json"


def tiny_over_eight() -> Params:
    params = tiny.experiment_params()
    params.sharding.set(mesh="data=8", strategy="data")
    return params


PARAMS = tiny.experiment_params().to_text().encode()
LINES = "ein Haus\nder Hund\nein Garten\n" * 20
TSV = "".join(f"de\tHaus {k}\thouse {k}\n" for k in range(40)).encode()
PO = 'msgid ""\nmsgstr "Language: de\\nContent-Type: text/plain; charset=UTF-8\\n"\n\n'
PO += "".join(f'msgid "house {k}"\nmsgstr "Haus {k}"\n\n' for k in range(20))
READERS = {
    "tsv": Reader(written("a.tsv", TSV), rows_of(TsvReader)),
    "gz": Reader(written("a.tsv.gz", gzip.compress(TSV)), rows_of(TsvReader)),
    "xz": Reader(written("a.tsv.xz", lzma.compress(TSV)), rows_of(TsvReader)),
    "zst": Reader(
        written("a.tsv.zst", zstandard.ZstdCompressor(write_checksum=True).compress(TSV)),
        rows_of(TsvReader),
    ),
    "text": Reader(written("a.txt", LINES.encode()), rows_of(TextReader)),
    "moses": Reader(written("a.de", LINES.encode()), moses_rows),
    "po": Reader(written("de.po", PO.encode()), rows_of(GettextReader)),
    "mo": Reader(written("de.mo", catalog()), rows_of(GettextReader)),
    "json lines": Reader(
        written("rows.jsonl", b'{"source": "Haus", "target": "house"}\n' * 40), prepared_rows
    ),
    "parquet": Reader(parquet, prepared_rows),
    "manifest": Reader(prepared, lambda path: manifest.read(path.parent)),
    "plan": Reader(written("plan.json", msgspec.json.encode(example_plan())), plan_file.load),
    "search": Reader(
        written("found.json", example_search(tiny_over_eight(), "cpu:8").to_json().encode()),
        planned_training.load,
    ),
    "params": Reader(
        written("params.txt", tiny.experiment_params().to_text().encode()), params_text.read
    ),
    "tokenizer": Reader(published_tokenizer, lambda path: others.of_others((str(path),))),
    "checkpoint": Reader(checkpoint, lambda path: read_run(path.parents[1]), names_file=False),
}


def changed(content: bytes, rng: random.Random) -> bytes:
    """Returns content with a few random changes."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(7)
        if kind == 0:
            del data[place:]
        elif kind == 1 and data:
            data[rng.randrange(len(data))] = rng.randrange(256)
        elif kind == 2:
            data[place:place] = rng.choice(ODD)
        elif kind == 3:
            del data[place : place + rng.randrange(1, 40)]
        elif kind == 4:
            data[place:place] = data[place : place + rng.randrange(1, 200)]
        elif kind == 5:
            data[place : place + rng.randrange(1, 8)] = rng.choice(ODD)
        else:
            data[place:place] = NESTED
    return bytes(data)


def check(reader: Reader, directory: pathlib.Path, count: int) -> None:
    path = directory / reader.make(directory)
    whole = path.read_bytes()
    reader.read(path)
    rng = random.Random(path.name)
    for number in range(count):
        path.write_bytes(changed(whole, rng))
        try:
            reader.read(path)
        except ValueError as error:
            kept = directory / f"fault-{number}"
            kept.write_bytes(path.read_bytes())
            assert type(error) is not UnicodeDecodeError, kept
            assert not reader.names_file or path.name in str(error), (kept, error)
            kept.unlink()


@pytest.mark.parametrize("name", READERS)
def test_changed_files_are_read_or_refused(name, tmp_path):
    check(READERS[name], tmp_path, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_many_changed_files_are_read_or_refused(name, tmp_path):
    check(READERS[name], tmp_path, MANY)
