# tests: tools/plan.py, tools/plan_reports/page_server.py
"""Runs gshard-plan from the command line: plans, pages, comparisons, suggestions and errors."""

import contextlib
import dataclasses
import json
import os
import pty
import subprocess
import sys

import pytest

import lingvo_gshard
from lingvo_gshard.tools import plan
from lingvo_gshard.tools.console import startup, with_flags
from lingvo_gshard.wings.planning.machines import compilers, topologies
from lingvo_gshard.wings.planning.plan import plan as plan_file
from tests.planning import example_plan
from tests.tools.tiny_quickstart import FLAGS as TINY

REQUIRED = {
    "bytes_per_device": {
        *("weights", "moments", "activations", "inputs", "program", "peak", "capacity", "host")
    },
    "parameters": {"total", "active"},
    "flops": {"useful", "executed", "rematerialized", "dispatch", "padding"},
}
COLLECTIVE = {"kind", "axis", "layer", "dtype", "bytes", "count", "share"}
TENSOR = {"path", "kind", "layer", "layout", "shape", "dtype", "split", "bytes", "bytes_per_device"}


def run_here(capsys, *flags):
    """Returns (exit code, standard output, standard error) of a run in this process."""
    capsys.readouterr()
    code = startup.guarded(plan.NAME, plan.main)([plan.NAME, *map(str, flags)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Writes two plans of one experiment: expert.json with expert.html, and fsdp.json.

    expert.out and expert.err are what the command prints.
    """
    folder = tmp_path_factory.mktemp("planned")
    flags = [plan.NAME, *TINY, "--topology=cpu:8", "--tokens=1e9"]
    expert = [f"--json={folder}/expert.json", f"--html={folder}/expert.html", "--goodput"]
    with (
        (folder / "expert.out").open("w") as out,
        (folder / "expert.err").open("w") as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        assert startup.guarded(plan.NAME, plan.main)([*flags, *expert]) == 0
    assert plan.main([*flags, "--strategy=expert_fsdp", f"--json={folder}/fsdp.json"]) == 0
    return folder


def test_json_contains_the_complete_plan(planned):
    assert plan_file.load(planned / "expert.json").name == "translation.quickstart"
    record = json.loads((planned / "expert.json").read_text())
    assert set(record) == set(example_plan.example_plan())
    for name, keys in REQUIRED.items():
        assert keys == set(record[name])
    assert all(COLLECTIVE <= set(row) for row in record["collectives"])
    assert all(TENSOR <= set(row) for row in record["tensors"])
    assert record["name"] == "translation.quickstart" and record["fits"] is True
    assert record["mesh"] == "data=8" and record["strategy_name"] == "expert"
    assert record["budget"]["tokens"] == 1e9 and record["remedies"] == []
    assert record["goodput"]["tokens"] == 1e9 and record["goodput"]["chips"] == 8
    assert (record["topology"], record["compiler"]) == ("cpu:8", "cpu")
    assert record["notes"][0].startswith("an estimate")
    page = (planned / "expert.html").read_text()
    assert page.startswith("<!") and "translation.quickstart" in page


@pytest.mark.slow
def test_json_is_the_only_standard_output(capsys):
    code, out, err = run_here(capsys, *TINY, "--topology=gpu:h100:1x8", "--json")
    record = json.loads(out)
    assert code == 0 and record["compiler"] == "cpu"
    assert any("in place of GPUs" in note for note in record["notes"])
    assert "It fits: peak" in err and "Compiled for CPU devices, not this chip" in err
    assert "XLA's compiler for CPUs compiles the step" in err and "tokens cost" not in err


def test_report_and_progress_are_printed(planned):
    out, err = ((planned / f"expert.{name}").read_text() for name in ("out", "err"))
    check_printed(out, err, "mesh data=8")


@pytest.mark.slow
def test_report_on_a_mesh_of_two_axes_is_printed(capsys):
    code, out, err = run_here(capsys, *TINY, "--topology=cpu:8", "--mesh=data=4,model=2")
    assert code == 0
    check_printed(out, err, "mesh data=4,model=2")


def check_printed(out, err, mesh):
    assert out.splitlines()[0].startswith("It fits: peak ")
    for words in (mesh, "of capacity", "all-to-all over data", "useful", "Note: "):
        assert words in out
    compiler, *stages = err.splitlines()
    assert compiler == topologies.get("cpu:8").compiler_choice
    known = {"tracing and lowering", "compiling for cpu:8", "reading the compiled program"}
    assert {line.partition(": ")[0] for line in stages} <= known


@pytest.mark.slow
def test_terminal_shows_a_spinner(tmp_path):
    """Standard error is a terminal and shows each stage, even while the compiler runs."""
    written = tmp_path / "plan.json"
    shown, terminal = pty.openpty()
    command = [sys.executable, "-m", "lingvo_gshard", "plan", *TINY, "--topology=cpu:2"]
    with written.open("wb") as out:
        run = subprocess.Popen(
            [*command, "--json"],
            stdout=out,
            stderr=terminal,
            env={**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    os.close(terminal)
    text = b""
    try:
        while part := os.read(shown, 65536):
            text += part
    except OSError:
        pass
    run.wait(timeout=60)
    os.close(shown)
    assert run.returncode == 0 and json.loads(written.read_text())["devices"] == 2
    frames = text.decode().split("\r")
    assert sum("compiling for cpu:2" in frame for frame in frames) > 3
    assert "It fits: peak" in text.decode()


def test_diff_compares_two_plans(planned, capsys):
    before, after = planned / "expert.json", planned / "fsdp.json"
    code, out, err = run_here(capsys, "diff", before, after)
    assert code == 0 and err == ""
    assert "weights" in out and "all-gather" in out
    code, out, _ = run_here(capsys, "diff", before, before)
    assert (code, out) == (0, "Nothing changed.\n")
    code, out, err = run_here(capsys, "diff", before, after, "--json")
    rows = json.loads(out)
    assert code == 0 and "all-gather" in err
    assert {"section", "what", "field", "before", "after", "ratio"} <= set(rows[0])


def test_diff_fails_on_exceeded_limits(planned, capsys, tmp_path):
    before, after = planned / "expert.json", planned / "fsdp.json"
    path = tmp_path / "changes.md"
    limits = "--fail_on=weights>+1%,all-gather>0, mfu<-100%"
    code, out, _ = run_here(capsys, "diff", before, after, limits, f"--markdown={path}")
    assert code == 2 and "of 3 limits exceeded" in out
    assert "| all-gather&gt;0 |" in path.read_text() or "| all-gather>0 |" in path.read_text()
    code, out, _ = run_here(capsys, "diff", before, before, limits, f"--markdown={path}")
    assert code == 0 and "0 of 3 limits exceeded." in out
    assert "Nothing changed." in path.read_text()


def test_diff_of_other_versions_needs_a_flag(planned, tmp_path, capsys):
    record = json.loads((planned / "expert.json").read_text())
    record["versions"]["jax"] = "0.1"
    (tmp_path / "old.json").write_text(json.dumps(record))
    files = tmp_path / "old.json", planned / "expert.json"
    code, out, err = run_here(capsys, "diff", *files)
    assert code == 1 and out == "" and "jax 0.1" in err and "--allow_other_versions" in err
    code, out, _ = run_here(capsys, "diff", *files, "--allow_other_versions")
    assert code == 0
    (tmp_path / "format.json").write_text(json.dumps({**record, "format": 99}))
    code, _, err = run_here(capsys, "diff", tmp_path / "format.json", files[1])
    assert code == 1 and "plan format 99" in err


def test_topologies_are_listed(capsys):
    code, out, err = run_here(capsys, "--list_topologies")
    assert code == 0 and err == ""
    for name in topologies.names():
        assert f"\n{name} " in out


@pytest.fixture
def small_chips(monkeypatch):
    """Returns a function that sets the memory of all devices, to make a step exceed it."""
    get = topologies.get

    def with_memory(size):
        def small(name):
            topology = get(name)
            chip = dataclasses.replace(topology.chip, usable_bytes=size)
            return dataclasses.replace(topology, chip=chip)

        monkeypatch.setattr(topologies, "get", small)

    return with_memory


@pytest.mark.slow
def test_suggestions_are_planned_if_the_step_does_not_fit(planned, small_chips, capsys, tmp_path):
    peak = plan_file.load(planned / "expert.json").bytes_per_device.peak
    small_chips(peak - 1)
    path = tmp_path / "plan.json"
    code, out, err = run_here(capsys, *TINY, "--topology=cpu:8", f"--json={path}")
    record = json.loads(path.read_text())
    assert code == 0 and record["fits"] is False
    assert record["bytes_per_device"]["peak"] == peak
    rows = record["remedies"]
    assert 1 <= len(rows) <= 3
    fitting = [row for row in rows if row["fits"]]
    assert fitting and all(row["peak"] < peak for row in fitting)
    assert all(f"It fits with {with_flags(row['change'])}" in out for row in fitting)
    assert out.startswith("It does not fit: peak ") and "changes tried" in out
    assert err.count("it does not fit; trying --") == len(rows)


@pytest.mark.slow
def test_sharded_weights_fit_on_a_tpu(capsys, tmp_path):
    """A billion weights with two moments each: 16.3 GiB on a core, half of that if sharded."""
    pytest.importorskip("libtpu")
    large = {
        "task.model_dim": 1024,
        "task.decoder.hidden_dim": 2**19,
        "task.encoder.execution.rematerialize": "full",
        "task.decoder.execution.rematerialize": "full",
        "input.batch_rows": 8,
    }
    settings = [f"--gin_param={path} = {value!r}" for path, value in large.items()]
    path = tmp_path / "plan.json"
    flags = [*TINY, *settings, "--gin_param=task.encoder.moe_every = 0", "--topology=v3:1x1"]
    code, out, err = run_here(capsys, *flags, f"--json={path}", "--remedies=1")
    record = json.loads(path.read_text())
    assert code == 0 and not record["fits"] and out.startswith("It does not fit: peak 16.3 GiB of")
    (row,) = record["remedies"]
    assert row["change"].startswith("`strategy=expert_fsdp`")
    assert row["fits"] and row["peak"] < 13 * 2**30
    assert any("The compiler for TPU v3 reported" in note for note in record["notes"])
    assert "the program does not fit: compiling for tpu7x:1x1x1, which has more memory" in err


TOPOLOGY = "--topology=cpu:8"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([*TINY], "--topology is missing, such as v3:32x32; --list_topologies shows all"),
        ([TOPOLOGY], "--experiment is missing"),
        ([*TINY, "--topology=v33:2x2"], "Did you mean 'v3'?"),
        ([*TINY, "--topology=gpu:h1000:1x8"], "Did you mean 'h100'?"),
        ([*TINY, "--topology=v3:32x33"], "a pod of TPU v3 has 1,024 chips"),
        ([*TINY, "--topology=v3:3x3"], "a host has 2x2 chips"),
        ([*TINY, TOPOLOGY, "--mesh=data=4"], "--mesh=data=4 has 4 devices, but --topology=cpu:8"),
        ([*TINY, TOPOLOGY, "--strategy=expret"], "Did you mean 'expert'?"),
        ([*TINY, TOPOLOGY, "--partitioner=shardi"], "Did you mean 'shardy'?"),
        ([*TINY, TOPOLOGY, "--device_order=topolgy"], "Did you mean 'topology'?"),
        ([*TINY, TOPOLOGY, "--toplogy=x"], "toplogy"),
        ([*TINY, TOPOLOGY, "--tokens=-1"], "tokens"),
        ([*TINY, TOPOLOGY, "--tokens=0"], "--tokens=0.0: expected a number of tokens"),
        ([*TINY, TOPOLOGY, "--tokens=inf"], "--tokens=inf; expected a finite number"),
        ([*TINY, TOPOLOGY, "--json=/dev/null/x"], "--json=/dev/null/x cannot be written: "),
        ([*TINY, TOPOLOGY, "--html=/tmp"], "--html=/tmp cannot be written: it is a directory"),
        ([*TINY, TOPOLOGY, "--html=-", "--json=-"], "standard output takes one of them"),
        (["diff", "one.json"], "compares two files written by --json; 1 was given"),
        (["diff", "one.json", "two.json"], "one.json: cannot be read: No such file"),
        (["diff", "a", "b", "--topology=cpu:8"], "--topology=cpu:8 does not apply to diff"),
        (["diff", "a", "b", "--fail_on=peek>1"], "unknown quantity 'peek'. Did you mean 'peak'?"),
        (["diff", "a", "b", "--fail_on=step>1s"], "unknown unit 's' of step; expected none or %"),
        (["dif", "a", "b"], "the subcommand 'dif' is unknown. Did you mean 'diff'?"),
    ],
)
def test_user_errors_are_one_line(flags, words, capsys):
    code, out, err = run_here(capsys, *flags)
    assert code == 1 and out == ""
    assert err.startswith("gshard-plan: error: ") and err.count("\n") == 1
    assert words in err


@pytest.mark.slow
def test_missing_or_mismatched_libtpu_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(compilers, "installed", lambda: "0.0.1")
    code, out, err = run_here(capsys, *TINY, "--topology=v3:2x2")
    assert code == 1 and out == ""
    assert "libtpu 0.0.1 is installed" in err and compilers.INSTALL in err
    monkeypatch.setattr(compilers, "installed", lambda: None)
    code, out, err = run_here(capsys, *TINY, "--topology=v3:2x2")
    assert code == 0 and "libtpu is not installed" in out
    first = err.splitlines()[0]
    assert "because libtpu is not installed. To install it: " in first
    assert first.endswith(compilers.INSTALL)
    assert "Compiled for CPU devices, not this chip" in out


def test_help_has_examples_and_all_flags(capsys):
    with pytest.raises(SystemExit) as exit_:
        plan.main([plan.NAME, "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert "gshard-plan diff before.json after.json" in out
    for name in plan.define_flags():
        assert f"--{name}" in out


def test_importing_the_package_does_not_import_tensorflow():
    code = (
        "import sys, lingvo_gshard\n"
        "assert not {'tensorflow', 'jax'} & set(sys.modules)\n"
        "from lingvo_gshard import plan\n"
        "assert plan.__module__ == 'lingvo_gshard.api.planning'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert {"partition", "plan"} <= set(lingvo_gshard.__all__)
