"""Prepares by Beam: `python -m tests.preparation.beam_run DIRECTORY SOURCE [OPTION ...]`."""

import pathlib
import sys

from lingvo_gshard.wings.preparation import sources
from lingvo_gshard.wings.preparation.pipeline import PrepareOptions, prepare
from lingvo_gshard.wings.preparation.preparation import Preparation

_OWN = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"
VALUES = {"bucket_bytes": 20_000, "shard_rows": 100}


def params(directory):
    """Returns Params for a tiny vocabulary; the test has the same."""
    made = Preparation.params().set(**VALUES)
    made.vocabulary.set(size=330, cache_directory=f"{directory}/cache")
    return made


def main():
    """Prepares a source. Without --runner, Beam's own runner works in this process."""
    directory, source, *options = sys.argv[1:]
    on_bad_row = "skip" if "--on_bad_row=skip" in options else "refuse"
    if not any(option.startswith("--runner=") for option in options):
        # Workers of other runners would import the module anew. The runner's threads share it.
        sources.PART_LINES = 100
        options.append(f"--runner={_OWN}")
    made = PrepareOptions(params(directory), 1, on_bad_row, beam=tuple(options))
    try:
        prepare(pathlib.Path(directory) / "beam", [source], made)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
