"""Compiles decoding programs in a process of its own, for the holder of a `CompilerProcess`."""

import contextlib
import os
import sys

from lingvo_gshard.api.decoding.compiler_process import read_value
from lingvo_gshard.api.decoding.decoder import LoadedRun
from lingvo_gshard.wings.cluster.child_process import answer_stream

# Niceness of this process while its parent serves, so that decoding comes first.
_NICENESS = 10


def main() -> None:
    """Compiles the programs whose keys come on standard input, until that ends."""
    # Libraries may print.
    answers = answer_stream()
    run = LoadedRun(*read_value(sys.stdin.buffer.readline()))
    for line in sys.stdin.buffer:
        key, is_nice = read_value(line)
        if is_nice:
            give_way()
        executables = run.decoder.engine.executables
        if key:
            executables.get(key)
        answers.write(b"done\n")


def give_way() -> None:
    """Lets other processes compute first. Linux gives each thread a niceness of its own."""
    tasks = "/proc/self/task"
    for thread in os.listdir(tasks) if os.path.isdir(tasks) else "0":
        # A thread may have ended.
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread), _NICENESS)


if __name__ == "__main__":
    main()
