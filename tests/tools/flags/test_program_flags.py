# tests: tools/flags/program.py
"""Runs gshard-plan with the file of a jax program, and with flags that do not fit it."""

import json

import jax
import jax.numpy as jnp
import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools import plan
from lingvo_gshard.tools.console import startup
from lingvo_gshard.tools.flags.program import kernel_flops, program_path


@pytest.fixture
def file(tmp_path):
    spec = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    product = jax.jit(lambda params, x: x.T @ params)
    path = tmp_path / "product.bin"
    path.write_bytes(jax.export.export(product)(spec, spec).serialize())
    return path


def test_a_file_is_planned(file, tmp_path, capsys):
    code = plan.main(
        [plan.NAME, f"--html={tmp_path / 'plan.html'}", "--topology=cpu:1", "--json", str(file)]
    )
    record = json.loads(capsys.readouterr().out)
    assert code == 0 and record["fits"] and record["mesh"] == "data=1"
    assert record["bytes_per_device"]["weights"] == 4 * 16 * 8
    assert record["flops"]["executed"] == 2 * 8 * 16 * 8
    assert "its own" in (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize(
    ("argv", "path"),
    [
        (["step.bin", "--topology=cpu:1"], "step.bin"),
        (["--topology=cpu:1", "step.bin"], "step.bin"),
        (["--json", "programs/step"], "programs/step"),
        (["--topology", "v5e:4x4"], ""),
        (["--list_topologies"], ""),
        (["diff", "a.json", "b.json"], ""),
        (["dif", "a.json", "b.json"], ""),
        ([], ""),
    ],
)
def test_the_path_is_the_first_or_the_last_argument(argv, path):
    found, rest = program_path(["gshard-plan", *argv], ["diff"])
    assert found == path
    assert rest == ["gshard-plan", *(a for a in argv if not path or a != path)]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["{}", "--strategy=expert", "--topology=cpu:1"],
            "--strategy=expert does not apply to the",
        ),
        (["{}"], "--topology is missing"),
        (["{}", "--weights=[", "--topology=cpu:1"], "--weights=[ is no regular expression"),
        (["{}", "--topology=cpu:2"], "was made for 1 device, data=1, but --topology="),
        (["--weights=w", "--topology=cpu:1"], "--weights=w applies to the file of a program"),
        (["none.bin", "--topology=cpu:1"], "none.bin: cannot be read: No such file or directory"),
    ],
)
def test_user_errors_are_one_line(file, flags, words, capsys):
    argv = [flag.format(file) for flag in flags]
    assert startup.guarded(plan.NAME, plan.main)([plan.NAME, *argv]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("gshard-plan: error: ") and words in error


def test_flops_of_kernels_are_read():
    assert kernel_flops(None) == kernel_flops("") == {}
    assert kernel_flops("my_kernel=1.5e12,^b=c$=3") == {"my_kernel": 1.5e12, "^b=c$": 3.0}


@pytest.mark.parametrize("text", ["my_kernel", "=3", "a=many", "a=1,b=-2", "a=inf", "a=nan"])
def test_flops_of_kernels_that_are_no_numbers_are_refused(text):
    with pytest.raises(UserError, match=r"^--kernel_flops=.* expected a kernel's name and the"):
        kernel_flops(text)
