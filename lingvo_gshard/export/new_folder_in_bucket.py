"""A new folder in a bucket: written to a local disk, then copied."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files import copies, objects
from lingvo_gshard.core.files.paths import GivenPath, split
from lingvo_gshard.core.files.problems import BucketError

# Written and deleted to find out whether files can be written.
_PROBE = ".gshard-probe"


def check_output(path: GivenPath) -> None:
    """Checks that files can be written to a new folder, so that no long work is done in vain.

    Raises:
      UserError: they cannot, or the folder has files; names --output.
    """
    split(path)
    url = os.fspath(path).rstrip("/")
    try:
        if objects.is_file(url):
            raise UserError(f"`output={path}` is a file; give the name of a new directory")
        if objects.names(url):
            raise UserError(
                f"`output={path}` exists and is not empty; give the name of a new directory"
            )
        objects.write_bytes(f"{url}/{_PROBE}", b"")
        objects.remove(f"{url}/{_PROBE}")
    except BucketError as error:
        raise UserError(f"`output={path}` cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def new_folder(path: GivenPath, needed: int) -> Iterator[pathlib.Path]:
    """Gives a local folder, and copies its files to a new one in a bucket when the context ends.

    If that fails, the files that were copied are deleted.

    Args:
      path: the new folder, as for `check_output`.
      needed: bytes that will be written at least.

    Raises:
      UserError: the local disk has no room for `needed` bytes, or a file cannot be written; names
        --output.
    """
    check_output(path)
    local = copies.new_folder("export")
    free = shutil.disk_usage(local).free
    if needed > free:
        raise UserError(
            f"`output={path}` cannot be written: files are written to {local.parent.parent} first, "
            f"where no space is left: {needed / 1e6:,.0f} MB needed, {free / 1e6:,.0f} MB free. "
            "Set TMPDIR to a larger disk"
        )
    try:
        yield local
        copies.upload_folder(local, os.fspath(path).rstrip("/"))
    except OSError as error:
        with contextlib.suppress(OSError):
            objects.remove_tree(path)
        raise UserError(f"`output={path}` cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(local, ignore_errors=True)
