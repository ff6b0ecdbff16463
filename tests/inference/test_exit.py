# tests: wings/inference/engine/engine.py
"""Tests that a process may end while its engine decodes."""

import subprocess
import sys

import pytest

_SCRIPT = """
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.requests import Request
from tests.inference import tiny_engine

engine = tiny_engine.translation_model().engine(workers=2)
options = DecodingOptions(most_tokens=60, least_tokens=60)
first, *_ = engine.submit_all([Request((3, 4, 5), (1,), options)] * 2_000)
print(len(first.result()), flush=True)
del engine
"""


@pytest.mark.slow
def test_a_process_ends_while_its_engine_decodes():
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
