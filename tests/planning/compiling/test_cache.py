"""Compiled programs on disk: read as written, refused when damaged, bounded in size."""

import os

import pytest

from lingvo_gshard.wings.hlo import FullReplication
from lingvo_gshard.wings.planning.compiling.cache import CompilationCache, OptimizedHlo

REPLICATED = FullReplication("layer/einsum", "{devices=[2,1]0,1}", "{devices=[1,2]0,1}")
KEYS = tuple(digit * 64 for digit in "abc")


def compiled(content: bytes = b"hlo", seconds: float = 2.5) -> OptimizedHlo:
    memory = {"arguments": 1, "outputs": 2, "temporaries": 3, "code": 4, "peak": 10}
    return OptimizedHlo(content, memory, seconds, [REPLICATED], True, "a note", False)


def counts(cache: CompilationCache) -> tuple[int, int, int]:
    return cache.read, cache.compiled, cache.damaged


def test_what_is_read_equals_what_was_written(tmp_path):
    cache = CompilationCache(tmp_path / "plans")
    assert cache.get(KEYS[0]) is None
    cache.put(KEYS[0], compiled())
    assert CompilationCache(tmp_path / "plans").get(KEYS[0]) == compiled()
    assert cache.get(KEYS[1]) is None
    assert counts(cache) == (0, 2, 0)
    assert [path.name for path in (tmp_path / "plans").iterdir()] == [f"{KEYS[0]}.compiled"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: b"",
        lambda content: content[:40] + bytes([content[40] ^ 1]) + content[41:],
        lambda content: content + b"more",
    ],
)
def test_damaged_file_is_removed_and_counted(tmp_path, damage):
    cache = CompilationCache(tmp_path)
    cache.put(KEYS[0], compiled())
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get(KEYS[0]) is None and not path.exists()
    assert counts(cache) == (0, 1, 1)
    cache.put(KEYS[0], compiled())
    assert cache.get(KEYS[0]) == compiled() and counts(cache) == (1, 1, 1)


def test_file_of_another_format_is_compiled_again(tmp_path):
    """Its digest is right, and its content is not what is expected."""
    import hashlib
    import zlib

    packed = zlib.compress(b"\x81\xa5proto\x01")
    (tmp_path / f"{KEYS[0]}.compiled").write_bytes(hashlib.sha256(packed).digest() + packed)
    cache = CompilationCache(tmp_path)
    assert cache.get(KEYS[0]) is None and counts(cache) == (0, 1, 1)


def test_files_used_longest_ago_are_removed(tmp_path):
    content = os.urandom(1000)
    cache = CompilationCache(tmp_path, most_bytes=3000)
    (tmp_path / "other.txt").write_bytes(content * 9)
    for age, key in enumerate(KEYS[:2]):
        cache.put(key, compiled(content))
        os.utime(tmp_path / f"{key}.compiled", (age, age))
    assert cache.get(KEYS[0]) is not None  # Now the second is the one used longest ago.
    cache.put(KEYS[2], compiled(content))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f"{KEYS[0]}.compiled", f"{KEYS[2]}.compiled", "other.txt"}


def test_short_compilations_are_not_kept(tmp_path):
    cache = CompilationCache(tmp_path)
    cache.put(KEYS[0], compiled(seconds=0.5))
    assert not list(tmp_path.iterdir())


def test_errors_of_the_disk_do_not_stop_a_plan(tmp_path):
    (tmp_path / "file").write_text("no directory")
    cache = CompilationCache(tmp_path / "file")
    cache.put(KEYS[0], compiled())
    assert cache.get(KEYS[0]) is None and counts(cache) == (0, 1, 0)
