"""The preparation that a test kills: python -m tests.preparation.killed_run DIRECTORY OUT."""

import pathlib
import sys

from lingvo_gshard.wings.preparation.sources import PART_LINES
from tests.preparation import raw


def main():
    """Prepares the TSV files of a directory with two workers."""
    directory, output = pathlib.Path(sys.argv[1]), sys.argv[2]
    sources = [str(path) for path in sorted(directory.glob("*.tsv"))]
    raw.run(directory, sources, workers=2, output=output, bucket_bytes=100_000, shard_rows=500)


if __name__ == "__main__":
    PART_LINES = 500
    main()
