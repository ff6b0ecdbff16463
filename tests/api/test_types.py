# tests: __init__.pyi, api/planning.py, api/partitioning.py, api/options.py, api/run.py
# tests: wings/inference/options.py
"""Tests that a type checker knows the public functions: their results, and wrong names."""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
import typing

import pytest

from lingvo_gshard.api.run import EvaluationFields
from lingvo_gshard.tasks import LanguageModelTask, TranslationTask
from lingvo_gshard.wings.inference.options import DecodingFields, DecodingOptions

_ROOT = pathlib.Path(__file__).parents[2]
# A program of a user, and what the checker says of each line: a type, or the start of an error.
_LINES = {
    "from typing import Any": "",
    "import lingvo_gshard as gshard": "",
    'params = gshard.experiment("translation.quickstart")': "",
    'reveal_type(gshard.plan(params, "cpu:8", mesh="data=8"))': "Plan",
    'reveal_type(gshard.verify(params, mesh="data=2"))': "Verification",
    'reveal_type(gshard.plan_generation(params, "cpu:1", "largest"))': "LargestBatch",
    'reveal_type(gshard.plan_generation(params, "cpu:1", 8))': "GenerationPlan",
    'gshard.plan(params, "cpu:8", mash="data=8")': 'No parameter named "mash"',
    'gshard.plan(params, "cpu:8", tokens="many")': "Argument of type \"Literal['many']\"",
    'gshard.verify(params, mesh="data=2", tolerence=0.1)': 'No parameter named "tolerence"',
    'gshard.RuntimeOptions(strategi="expert")': 'No parameter named "strategi"',
    'run = gshard.load("runs/small")': "",
    'reveal_type(run.translate(["Ola"], beam_size=1, stop=(".",)))': "list[str]",
    'reveal_type(run.generate(["Ola"], temperature=0.8, seed=None))': "list[list[str]]",
    'reveal_type(run.evaluate("test", languages=["gl"], by_source=True, top_k=2))': "Evaluation",
    'run.evaluate("test", **dict[str, Any](option_of_my_task=3))': "",
    'run.translate(["Ola"], beam_sise=1)': 'No parameter named "beam_sise"',
    'run.generate(["Ola"], temperature="hot")': "Argument of type \"Literal['hot']\"",
    'run.evaluate("test", laguages=["gl"])': 'No parameter named "laguages"',
    'run.evaluate("test", languages=1)': 'Argument of type "Literal[1]"',
}


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    """Returns the messages of the checker by line."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "use.py").write_text("\n".join(_LINES) + "\n")
    settings = {"typeCheckingMode": "basic", "extraPaths": [str(_ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    checker = pathlib.Path(sys.executable).with_name("basedpyright")
    command = [str(checker), "--outputjson", f"--pythonpath={sys.executable}"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    found = json.loads(ran.stdout)["generalDiagnostics"]
    return {each["range"]["start"]["line"]: each["message"] for each in found}


@pytest.mark.skipif(
    not shutil.which("basedpyright", path=str(pathlib.Path(sys.executable).parent)),
    reason="basedpyright is not installed beside Python",
)
@pytest.mark.parametrize("line", _LINES)
def test_a_checker_knows_results_and_refuses_wrong_arguments(line, messages):
    message = messages.get(list(_LINES).index(line), "")
    if line.startswith("reveal_type"):
        assert message.endswith(f'is "{_LINES[line]}"')
    else:
        assert message.startswith(_LINES[line]) and bool(message) == bool(_LINES[line])


def test_keyword_arguments_are_the_fields_of_decoding_options_and_of_evaluations():
    declared = {field.name: field.type for field in dataclasses.fields(DecodingOptions)}
    assert DecodingFields.__annotations__.keys() == declared.keys()
    hints = typing.get_type_hints(DecodingOptions)
    assert typing.get_type_hints(DecodingFields) == {name: hints[name] for name in declared}
    own = EvaluationFields.__annotations__.keys() - declared.keys()
    assert own == {*TranslationTask.EVALUATION_OPTIONS, *LanguageModelTask.EVALUATION_OPTIONS}
