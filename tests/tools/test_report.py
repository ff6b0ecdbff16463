"""Tests gshard-report through its command line."""

import json
import subprocess
import sys

import pytest

import lingvo_gshard
from lingvo_gshard.tools import report
from lingvo_gshard.tools.console import startup
from tests.pages.elements import embedded
from tests.reporting import example_runs


def run_here(capsys, *flags):
    """Returns (exit code, standard output, standard error) of a run in this process."""
    code = startup.guarded(report.NAME, report.main)([report.NAME, *map(str, flags)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [
        example_runs.write_run(folder / name, steps, seed)
        for name, steps, seed in (("first", 400, 1), ("second", 100, 2))
    ]


def test_tables_have_the_figures_of_the_run(capsys, runs):
    code, out, err = run_here(capsys, f"--logdir={runs[0]}")
    assert (code, err) == (0, "")
    for text in (
        "400 of 400",
        "4 CPU devices as data=2,model=2, strategy expert_tensor",
        "chrF 43.3, BLEU 21.7, perplexity 7.75",
        "first: spikes at step 77, 300",
        "first: compiled again for step 120, in 3.5 s: ids: int32[8,16] became int32[8,24]",
        "encoder.layers[1]",
        "first: gshard-train --experiment='test.example' --logdir=run",
    ):
        assert text in out


@pytest.mark.parametrize("separate", [True, False])
def test_several_runs_are_compared(capsys, runs, separate):
    flags = [f"--logdir={run}" for run in runs]
    flags = flags if separate else [f"--logdir={runs[0]},{runs[1]}"]
    code, out, _ = run_here(capsys, *flags)
    assert code == 0
    assert "first" in out and "second" in out and "step.seed" in out


def test_html_and_json_have_the_same_report(capsys, tmp_path, runs):
    html, record = tmp_path / "report.html", tmp_path / "report.json"
    code, out, err = run_here(capsys, f"--logdir={runs[0]}", f"--html={html}", f"--json={record}")
    assert (code, err) == (0, "")
    assert out == f"Report on first written to {html}\n"
    page = embedded(html.read_text(encoding="utf-8"))
    assert page["report"] == json.loads(record.read_text(encoding="utf-8"))


def test_json_alone_goes_to_standard_output_and_tables_to_standard_error(capsys, runs):
    code, out, err = run_here(capsys, f"--logdir={runs[0]}", "--json")
    assert code == 0
    assert json.loads(out)["runs"][0]["label"] == "first"
    assert "400 of 400" in err


def test_mistakes_are_sentences_with_flag_and_path(capsys, tmp_path, runs):
    missing = tmp_path / "nowhere"
    assert run_here(capsys, f"--logdir={missing}") == (
        1,
        "",
        f"gshard-report: error: --logdir={missing}: there is no such directory. Train one first: "
        f"gshard-train --experiment=NAME --logdir={missing}\n",
    )
    html = tmp_path / "no" / "report.html"
    code, _, err = run_here(capsys, f"--logdir={runs[0]}", f"--html={html}")
    assert code == 1
    assert f"--html={html} cannot be written: there is no directory" in err


def test_report_needs_neither_tensorflow_nor_jax(runs):
    code = (
        "import sys; from lingvo_gshard.tools import report;"
        f"report.main(['gshard-report', '--logdir={runs[0]}', '--html={runs[0]}/report.html']);"
        "sys.exit(bool({'tensorflow', 'jax'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_python_api_returns_the_report_and_writes_the_page(tmp_path, runs):
    html = tmp_path / "report.html"
    found = lingvo_gshard.report(runs, html=html)
    assert [run.label for run in found.runs] == ["first", "second"]
    assert embedded(html.read_text(encoding="utf-8"))["report"]["runs"][1]["label"] == "second"
    with pytest.raises(ValueError, match=r"^`html=.*nowhere.*cannot be written: No such file"):
        lingvo_gshard.report(runs[0], html=tmp_path / "nowhere" / "report.html")
