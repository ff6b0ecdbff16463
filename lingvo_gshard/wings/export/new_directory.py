"""A new directory that is complete or not there at all."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from lingvo_gshard.core import (
    BucketError,
    UserError,
    called_before_abrupt_end,
    explained,
    is_bucket,
    objects,
    stores,
)
from lingvo_gshard.wings.object_stores import buckets, scratch
from lingvo_gshard.wings.object_stores.connections import split

# Name of a file that is written and deleted, to find out whether files can be written.
_PROBE = ".gshard-probe"


def check_folder_in_bucket(path: stores.GivenPath) -> None:
    """Raises UserError, which names `output`, if files cannot be written to a new folder."""
    split(path)
    url = os.fspath(path).rstrip("/")
    with explained(f"`output={path}` cannot be written", BucketError):
        if objects.is_file(url):
            raise UserError(f"`output={path}` is a file; give the name of a new directory")
        if objects.names(url):
            raise UserError(
                f"`output={path}` exists and is not empty; give the name of a new directory"
            )
        objects.write_bytes(f"{url}/{_PROBE}", b"")
        objects.remove(f"{url}/{_PROBE}")


@contextlib.contextmanager
def new_folder(path: stores.GivenPath, needed: int) -> Iterator[pathlib.Path]:
    """Gives a local folder, and copies its files to a new one in a bucket when the context ends.

    If that fails, the files that were copied are deleted. Raises the errors of `new_directory`.
    """
    check_folder_in_bucket(path)
    local = scratch.new_folder("export")
    free = shutil.disk_usage(local).free
    if needed > free:
        raise UserError(
            f"`output={path}` cannot be written: files are written to {local.parent.parent} first, "
            f"where no space is left: {needed / 1e6:,.0f} MB needed, {free / 1e6:,.0f} MB free. "
            "Set TMPDIR to a larger disk"
        )
    try:
        yield local
        buckets.upload_folder(local, os.fspath(path).rstrip("/"))
    except OSError as error:
        with contextlib.suppress(OSError):
            objects.remove_tree(path)
        raise UserError(f"`output={path}` cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(local, ignore_errors=True)


def check_output(path: str | os.PathLike) -> None:
    """Checks that a directory can be created, so that no long work is done in vain.

    Args:
      path: the directory. It may exist if it is empty. Its parent must exist, since a missing one
        is most often a typing error; the parent of a version, such as served/1, is made.

    Raises:
      UserError: it cannot be created; names `output`.
    """
    if is_bucket(path):
        check_folder_in_bucket(path)
        return
    target = _target(path)
    if target.is_dir():
        if any(target.iterdir()):
            raise UserError(
                f"`output={path}` exists and is not empty; give the name of a new directory"
            )
    elif os.path.lexists(target):
        raise UserError(f"`output={path}` is a file; give the name of a new directory")
    if not _there(target).is_dir():
        raise UserError(
            f"`output={path}`: there is no directory {target.parent}; create it first, or name "
            "another one"
        )
    try:
        tempfile.TemporaryFile(dir=_there(target)).close()
    except OSError as error:
        raise _cannot_be_written(path, error) from None


@contextlib.contextmanager
def new_directory(path: str | os.PathLike, needed: int = 0) -> Iterator[pathlib.Path]:
    """Gives a temporary directory beside a new one, and renames it when the context ends.

    If the context fails, or a signal ends the process, the temporary directory is removed. For a
    bucket, files are written to a local disk first and then copied.

    Raises:
      UserError: there is no room for `needed` bytes, or a file cannot be written; names `output`.
    """
    if is_bucket(path):
        with new_folder(path, needed) as local:
            yield local
        return
    check_output(path)
    target = _target(path)
    free = shutil.disk_usage(_there(target)).free
    if needed > free:
        raise UserError(
            f"`output={path}` cannot be written: no space left: {needed / 1e6:,.0f} MB needed, "
            f"{free / 1e6:,.0f} MB free"
        )
    prefix = f".{target.name}.partial-"
    partial = pathlib.Path(tempfile.mkdtemp(dir=_there(target), prefix=prefix))
    remove = functools.partial(shutil.rmtree, partial, ignore_errors=True)
    with called_before_abrupt_end(remove):
        try:
            yield partial
            _complete(partial, target)
        except OSError as error:
            remove()
            raise _cannot_be_written(path, error) from error
        except BaseException:
            remove()
            raise


def file_sizes(directory: str | os.PathLike[str]) -> dict[str, int]:
    """Returns path -> size in bytes of all files below a directory."""
    return {name: entry.size for name, entry in objects.find(directory).items()}


def _complete(partial: pathlib.Path, target: pathlib.Path) -> None:
    """Writes all files to the disk and gives the directory its name."""
    # Temporary directories, and the files of some libraries, are private.
    mask = os.umask(0)
    os.umask(mask)
    for path in partial.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)
            with objects.open_to_read(path) as file:
                os.fsync(file.fileno())
    partial.chmod(0o777 & ~mask)
    target.parent.mkdir(exist_ok=True)
    os.rename(partial, target)


def _there(target: pathlib.Path) -> pathlib.Path:
    """Returns the directory that must exist. A new one is first written there."""
    is_first_version = target.name.isdigit() and not target.parent.is_dir()
    return target.parent.parent if is_first_version else target.parent


def _target(path: str | os.PathLike) -> pathlib.Path:
    return pathlib.Path(os.path.realpath(path))


def _cannot_be_written(path: str | os.PathLike, error: OSError) -> UserError:
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
        reason = "it was created by someone else in the meantime"
    else:
        reason = (error.strerror or str(error)).lower()
    return UserError(f"`output={path}` cannot be written: {reason}")
