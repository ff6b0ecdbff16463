# tests: runtime/devices.py
"""Checks that a process reuses freed buffers without page faults."""

import subprocess
import sys

import pytest

# Prints the page faults of ten buffers of 64 MiB, written one after another.
PROGRAM = """
import resource, sys
import numpy as np
from lingvo_gshard.runtime import devices
if sys.argv[1] == "keep" and not devices.keep_pages():
    raise SystemExit(3)
np.ones(2**23)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    np.ones(2**23)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip("the C library is not glibc")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_reusing_a_buffer_causes_no_page_faults():
    assert page_faults("keep") < 100 < page_faults("leave")
