"""Steps that prepare a directory for a command: files, trained runs, and damage to them."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable

from tests import tiny
from tests.hard_knocks.sandbox import Sandbox
from tests.open_models import published
from tests.planning import example_search
from tests.tools import tiny_language_model, tiny_translation

Step = Callable[[Sandbox], None]


def trained(path: str, name: str = "test.tiny") -> Step:
    """Copies a trained run.

    Args:
      path: where to.
      name: "test.tiny", trained for 12 steps with checkpoints at 4, 8 and 12; "translation", for
        20; or "language model", for 30.
    """
    return lambda sandbox: _copy(sandbox.runs(name), sandbox / path)


def published_model(path: str, **config: object) -> Step:
    """Writes a published model with random weights.

    Args:
      path: where to.
      **config: values of its config.json that differ from those of tests/open_models/published.py.
    """
    return lambda sandbox: _done(published.write(sandbox / path, **config))


def write(path: str, content: str | bytes) -> Step:
    """Writes a file."""
    data = content.encode() if isinstance(content, str) else content
    return lambda sandbox: _done((sandbox / path).write_bytes(data))


def searched(path: str, mesh: str, topology: str) -> Step:
    """Writes the result of a search for test.tiny that compiled nothing."""
    params = tiny.experiment_params()
    params.sharding.set(mesh=mesh, strategy="data")
    return write(path, example_search.example_search(params, topology).to_json())


def folder(path: str) -> Step:
    """Makes a directory."""
    return lambda sandbox: (sandbox / path).mkdir()


def link(path: str, target: str) -> Step:
    """Makes a symbolic link."""
    return lambda sandbox: (sandbox / path).symlink_to(target)


def remove(path: str) -> Step:
    """Removes the one file or directory that a pattern finds."""

    def step(sandbox: Sandbox) -> None:
        found = _one(sandbox, path)
        shutil.rmtree(found) if found.is_dir() else found.unlink()

    return step


def cut(path: str, share: float = 0.5) -> Step:
    """Cuts the one file that a pattern finds to a share of its size."""

    def step(sandbox: Sandbox) -> None:
        found = _one(sandbox, path)
        os.truncate(found, int(share * found.stat().st_size))

    return step


def flip(path: str, position: float = 0.5) -> Step:
    """Flips the bits of the byte at a share of the size of the one file that a pattern finds."""

    def step(sandbox: Sandbox) -> None:
        found = _one(sandbox, path)
        data = bytearray(found.read_bytes())
        data[int(position * len(data))] ^= 0xFF
        found.write_bytes(data)

    return step


def replace(path: str, old: str, new: str) -> Step:
    """Replaces text, which is there, in a file."""

    def step(sandbox: Sandbox) -> None:
        text = _one(sandbox, path).read_text(encoding="utf-8")
        assert old in text, f"{path} lacks {old!r}"
        _one(sandbox, path).write_text(text.replace(old, new), encoding="utf-8")

    return step


def corpus(**settings: object) -> Step:
    """Writes train.tsv, dev.tsv, test.tsv and small.gin for translation.from_files.

    Args:
      **settings: Params by path, dots as double underscores.
    """
    return lambda sandbox: _done(_relative(sandbox, tiny_translation.write, settings))


def text_corpus(**settings: object) -> Step:
    """Writes train.txt, dev.txt, test.txt and small.gin for language_model.from_files."""
    return lambda sandbox: _done(_relative(sandbox, tiny_language_model.write, settings))


def _relative(sandbox: Sandbox, writer: Callable[..., list[str]], settings: dict) -> None:
    """Writes a corpus whose gin file has paths relative to the directory."""
    writer(sandbox.path, **settings)
    gin = sandbox / "small.gin"
    text = gin.read_text(encoding="utf-8").replace(f"{sandbox.path}/", "")
    gin.write_text(text.replace("'cache'", repr(str(sandbox.outside("cache")))), encoding="utf-8")


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
    shutil.copytree(source, target)


def _one(sandbox: Sandbox, pattern: str) -> pathlib.Path:
    (found,) = sandbox.path.glob(pattern)
    return found


def _done(_: object) -> None:
    """Drops a result."""
