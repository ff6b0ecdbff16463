# tests: /docs/accelerators.md, runtime/tpu_strategy.py
"""Compiles the training step for a TPU that is not attached, as in docs/accelerators.md."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "accelerators.md"
SMALL = """
experiment.input.set(batch_rows=8, source_length=32, target_length=32)
experiment.task.set(model_dim=16)
for stack in (experiment.task.encoder, experiment.task.decoder):
    stack.set(num_layers=1, hidden_dim=32, moe_every=1)
trainer = """


# test_compilation.py plans and compiles smaller steps for TPUs in seconds.
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra `plan`")
def test_training_step_compiles_for_eight_chips():
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert program.count("\ntrainer = ") == 1
    result = subprocess.run(
        [sys.executable, "-c", program.replace("\ntrainer = ", SMALL)],
        cwd=PAGE.parents[1],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    chips, memory, collectives = result.stdout.splitlines()
    assert chips == "8 TPU v5 lite"
    assert re.search(r"'peak': '\d+\.\d MiB'", memory)
    # Each of the two layers of experts sends its tokens there and back, and so do the gradients.
    assert int(re.search(r"'all-to-all': (\d+)", collectives).group(1)) >= 8
