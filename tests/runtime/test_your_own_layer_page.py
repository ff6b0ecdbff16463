"""docs/your_own_layer.md: its Python runs as it stands and prints what the page says."""

import os
import pathlib
import re
import subprocess
import sys

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "your_own_layer.md"


def test_the_page_runs_and_prints_what_it_says(tmp_path):
    text = PAGE.read_text(encoding="utf-8")
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)))
    environment = {**os.environ, "PYTHONPATH": str(PAGE.parents[1])}
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    run = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    printed = [line for line in run.stdout.splitlines() if ":" in line]
    (shown,) = re.findall(r"^```text\n(.*?)^```", text, re.M | re.S)
    assert printed[:-1] == shown.splitlines()
    assert printed[-1].startswith("Keras: [('all-reduce', '") and "down" in printed[-1]
