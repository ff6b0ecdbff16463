# tests: /docs/workflows/, tools/plan_reports/diff_report.py
"""Runs the workflow that users copy, with this repository on both sides of the pull request."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]


def commands(name: str) -> str:
    """Returns the shell commands of one step of the workflow."""
    lines = (ROOT / "docs" / "workflows" / "plan.yml").read_text().splitlines()
    start = lines.index(f"      - name: {name}")
    end = next((i for i in range(start + 1, len(lines)) if lines[i].startswith("      - ")), None)
    step = "\n".join(lines[start:end]).partition("run:")[2]
    return step.strip().removeprefix("|")


@pytest.mark.slow
def test_the_workflow_finds_an_added_collective(tmp_path):
    for side in ("before", "after"):
        (tmp_path / side).symlink_to(ROOT)
    environment = os.environ | {
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        "WHAT": "--experiment=translation.quickstart",
        "MACHINE": "--topology=cpu:2 --mesh=data=2 --strategy=expert",
        "LIMITS": "peak>+2%,step>+3%,all-gather>0",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }

    def run(text: str) -> int:
        return subprocess.run(["bash", "-ec", text], cwd=tmp_path, env=environment).returncode

    assert run(commands("plan")) == 0
    assert run(commands("compare")) == 0 and run(commands("show")) == 0
    environment["MACHINE"] = "--topology=cpu:2 --mesh=data=2 --strategy=fsdp"
    planned = commands("plan").replace("before after", "after")
    assert run(planned) == 0
    assert run(commands("compare")) == 2 and run(commands("show")) == 0
    assert "| all-gather>0 | 0 |" in (tmp_path / "summary.md").read_text()
