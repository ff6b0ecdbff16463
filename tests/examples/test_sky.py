# tests: /examples/cluster_job/sky.yaml
"""Checks the task of SkyPilot against SkyPilot's own schema, and its commands against our flags.

sky_0.14.1.json.xz has the schemas of SkyPilot 0.14.1 (Apache 2.0) that its parser checks a task
with: of the task, of its resources and of its storage, from sky/utils/schemas.py. With
GSHARD_SKY_PYTHON, a Python that has SkyPilot, its parser itself reads the file.
"""

import copy
import json
import lzma
import os
import pathlib
import shlex
import subprocess

import jsonschema
import pytest
import yaml

from lingvo_gshard.tools import evaluate, train

_HERE = pathlib.Path(__file__).parent
FILE = _HERE.parents[1] / "examples/cluster_job/sky.yaml"
SCHEMAS = json.loads(lzma.decompress((_HERE / "sky_0.14.1.json.xz").read_bytes()))
TASK = yaml.safe_load(FILE.read_text(encoding="utf-8"))


def check(task: dict) -> None:
    """Raises jsonschema.ValidationError as SkyPilot refuses a task."""
    jsonschema.validate(task, SCHEMAS["task"])
    jsonschema.validate(task["resources"], SCHEMAS["resources"])
    for mount in task["file_mounts"].values():
        jsonschema.validate(mount, SCHEMAS["storage"])


def test_the_task_fits_the_schema_of_skypilot():
    check(TASK)
    for place, name in (((), "setups"), (("resources",), "gpu"), (("file_mounts", "/runs"), "m")):
        wrong = copy.deepcopy(TASK)
        inner = wrong
        for key in place:
            inner = inner[key]
        inner[name] = "L4:1"
        with pytest.raises(jsonschema.ValidationError):
            check(wrong)


def test_its_commands_have_flags_that_there_are():
    commands = [shlex.split(line) for line in TASK["run"].splitlines()]
    ours = {"gshard-train": train, "gshard-evaluate": evaluate}
    found = [words for words in commands if words[0] in ours]
    assert [words[0] for words in found] == list(ours)
    for words in found:
        values = ours[words[0]].define_flags()
        assert values(words) == words[:1] and values.logdir == "$HOME/quickstart"


def test_its_environment_is_the_one_that_the_pages_install():
    assert "--constraint=constraints.txt . 'jax[cuda12]'" in TASK["setup"]
    assert (FILE.parents[2] / "constraints.txt").exists() and TASK["workdir"] == "."


@pytest.mark.skipif("GSHARD_SKY_PYTHON" not in os.environ, reason="no Python with SkyPilot")
def test_skypilot_itself_reads_the_task(tmp_path):
    program = "import sys, sky; print(sky.Task.from_yaml(sys.argv[1]).name)"
    command = [os.environ["GSHARD_SKY_PYTHON"], "-c", program, str(FILE)]
    environment = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.stdout.strip() == TASK["name"], result.stderr
