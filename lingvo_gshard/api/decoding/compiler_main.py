"""The process that compiles decoding programs for another one, which asks `CompilerProcess`."""

import os
import sys

from lingvo_gshard.api.decoding.compiler_process import read_value
from lingvo_gshard.api.decoding.decoder import LoadedRun
from lingvo_gshard.wings.cluster.child_process import answer_stream

# Added to the niceness of this process, so that decoding in other processes comes first.
_NICENESS = 10


def main() -> None:
    """Compiles the programs whose keys come on standard input, until that ends."""
    os.nice(_NICENESS)
    # Libraries may print.
    answers = answer_stream()
    run = LoadedRun(*read_value(sys.stdin.buffer.readline()))
    for line in sys.stdin.buffer:
        key = read_value(line)
        executables = run.decoder.engine.executables
        if key:
            executables.get(key)
        answers.write(b"done\n")


if __name__ == "__main__":
    main()
