"""Directories that `save_to_disk` of Hugging Face's datasets has written."""

import os

from lingvo_gshard.core import UserError, atomic, objects

# Files that list the files of a data set, and the splits of a directory with several.
_STATE, _SPLITS = "state.json", "dataset_dict.json"


def is_saved(path: str) -> bool:
    """Returns whether a path is such a directory."""
    return any(os.path.isfile(os.path.join(path, name)) for name in (_STATE, _SPLITS))


def saved_files(path: str, setting: str) -> list[str]:
    """Returns the files of a data set in the order of its rows.

    Raises:
      UserError: the directory is damaged, or has several splits.
    """
    splits = os.path.join(path, _SPLITS)
    if os.path.isfile(splits):
        names = _read(splits, "splits", setting)
        raise UserError(
            f"{setting}: the data set has the splits {', '.join(names)}; name each as a source "
            f"of its own, as in {os.path.join(path, names[0])}"
        )
    files = _read(os.path.join(path, _STATE), "_data_files", setting)
    found = [os.path.join(path, each["filename"]) for each in files]
    for file in found:
        if not os.path.isfile(file):
            raise UserError(f"{setting}: {file} is missing")
    return found


def _read(path: str, key: str, setting: str) -> list:
    """Returns a list of a file of JSON; UserError if it is not there."""
    try:
        return atomic.loads(objects.read_bytes(path))[key]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{setting}: {path} is damaged: {error!r}") from None
