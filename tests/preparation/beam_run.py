"""Prepares by Beam: `python -m tests.preparation.beam_run DIRECTORY SOURCE ON_BAD_ROW`."""

import pathlib
import sys

from lingvo_gshard.wings.preparation import sources
from lingvo_gshard.wings.preparation.pipeline import PrepareOptions, prepare
from lingvo_gshard.wings.preparation.preparation import Preparation

VALUES = {"bucket_bytes": 20_000, "shard_rows": 100}


def params(directory):
    """Returns Params for a tiny vocabulary; the test has the same."""
    made = Preparation.params().set(**VALUES)
    made.vocabulary.set(size=330, cache_directory=f"{directory}/cache")
    return made


def main():
    """Prepares a source by Beam's own runner in this process."""
    directory, source, on_bad_row = sys.argv[1:]
    # Workers of other runners would import the module anew. The runner's threads share it.
    sources.PART_LINES = 100
    runner = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"
    options = PrepareOptions(params(directory), 1, on_bad_row, beam=(f"--runner={runner}",))
    try:
        prepare(pathlib.Path(directory) / "beam", [source], options)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
