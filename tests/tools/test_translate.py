# tests: tools/translate.py, tools/console/line_command.py, core/files/lines.py
"""Tests gshard-translate through its command line."""

import io
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from lingvo_gshard.api.run import Run, load
from lingvo_gshard.core.files.lines import LONGEST_LINE
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.tools import translate
from lingvo_gshard.tools.console import line_command, startup
from lingvo_gshard.tools.experts.source_run import SourceRun
from lingvo_gshard.training.run.checkpoint.arrays import unflatten
from tests.tools.standard_input import StandardInput

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The model was trained for a few steps, and would end some translations at once.
_NOT_EMPTY = "--least_tokens=2"


@pytest.fixture(scope="module")
def trained(trained_logdir):
    """Returns the run, whose model is restored and compiled once for all tests."""
    return load(trained_logdir)


@pytest.fixture
def run_here(trained_logdir, trained, monkeypatch, capsys):
    """Returns a function from (input, flags) to (exit code, standard output, standard error)."""
    monkeypatch.setattr(Run, "decoder", trained.decoder)
    monkeypatch.setattr(Run, "model", trained.model)

    def run(content, *flags):
        monkeypatch.setattr(sys, "stdin", StandardInput(content))
        name = "gshard-translate"
        arguments = [name, f"--logdir={trained_logdir}", *flags]
        code = startup.guarded(name, translate.main)(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.slow
def test_each_line_is_translated_to_one_line(run_here):
    code, out, err = run_here(b"der Hund\n\nle chat voit\r\n", _NOT_EMPTY)
    assert code == 0 and err == ""
    lines = out.split("\n")
    assert len(lines) == 4 and lines[1] == lines[3] == ""
    assert run_here(b"le chat voit", _NOT_EMPTY)[1] == lines[2] + "\n"
    assert run_here(b"") == (0, "", "")


@pytest.mark.slow
def test_json_has_scores_of_the_best_translations(run_here):
    code, out, _ = run_here(b"der Hund\n\n", "--json", "--best=2", "--beam_size=2")
    record, empty = map(json.loads, out.splitlines())
    assert code == 0 and record["source"] == "der Hund"
    assert empty == {"source": "", "translation": "", "best": []}
    first, second = record["best"]
    assert first["text"] == record["translation"] and first["score"] >= second["score"]
    lengths = len(first["log_probabilities"]) - len(first["tokens"])
    assert lengths in (0, 1) and max(first["log_probabilities"]) <= 0


def test_many_lines_keep_their_order(run_here, monkeypatch):
    lines = [f"der Hund sieht {'rot ' * (n % 5)}" for n in range(20)]
    output = run_here("\n".join(lines).encode())[1]
    monkeypatch.setattr(line_command, "_BATCH_LINES", 3)
    assert run_here("\n".join(lines).encode())[1] == output
    assert output.count("\n") == 20


@pytest.mark.slow
def test_long_line_is_truncated_with_a_warning(run_here):
    code, out, err = run_here(b"der Hund\n" + b"der Hund " * 199 + b"\nHund\n", _NOT_EMPTY)
    assert code == 0 and out.count("\n") == 3
    assert err == "Warning: line 2 is longer than 256 tokens and was cut\n"


def test_invalid_utf8_line_is_reported(run_here):
    content = "Hund\ngr\u00fcn\n".encode() + b"\xff\xfe\nHund\n"
    code, out, err = run_here(content, _NOT_EMPTY)
    assert code == 1 and out.count("\n") == 2
    assert err == (
        "gshard-translate: error: standard input: line 3 is not UTF-8 (byte 1); "
        "--on_bad_line=skip leaves such lines empty\n"
    )
    code, skipped, err = run_here(content, "--on_bad_line=skip", _NOT_EMPTY)
    assert code == 0 and skipped.startswith(out + "\n") and skipped.count("\n") == 4
    assert err == "Warning: line 3 is not UTF-8 (byte 1): left empty\n"


def test_empty_translations_have_a_hint(run_here):
    code, out, err = run_here(b"Hund\n\nChat\n", "--allowed_tokens=2", "--beam_size=1")
    assert (code, out) == (0, "\n\n\n")
    assert err.startswith("Warning: 2 lines have an empty translation (the first is line 1): ")
    assert "--least_tokens=2" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--on_bad_line=skipp"], "--on_bad_line=skipp is unknown. Did you mean 'skip'?"),
        (["--logdir=/no/such"], "there is no such directory"),
        (["Hund"], "'Hund' is not a flag"),
        (["--best=5", "--beam_size=3"], "best is 5, but a search with beam_size=3 finds 3 texts"),
    ],
)
def test_user_errors_are_one_line(flags, words, run_here):
    code, out, err = run_here(b"Hund\n", *flags)
    assert code == 1 and out == ""
    assert err.startswith("gshard-translate: error: ") and err.count("\n") == 1
    assert words in err


def test_a_command_ends_while_it_waits_for_a_line():
    code = (
        "import sys, time, types; from lingvo_gshard.tools.console import line_command as c; "
        "c.LineReader(c.open_input(types.SimpleNamespace(input=''))); time.sleep(0.2); sys.exit(3)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr
        assert (process.wait(), b"Fatal" in process.stderr.read()) == (3, False)


def test_a_line_that_is_too_long_is_bad_as_one_that_is_no_text_is():
    lines = line_command.LineReader(io.BytesIO(b"a\n" + b"b" * (LONGEST_LINE + 1) + b"\nc"))
    batch = [line for chunk in lines.batches() for line in chunk]
    assert batch == [b"a", None, b"c"]
    assert line_command._decode(batch, 0, True, "x")[0] == ["a", "", "c"]
    texts, error = line_command._decode(batch, 0, False, "x")
    assert texts == ["a"] and str(error).startswith("x: line 2 has more than 16,777,216 bytes; --")


def test_waiting_lines_are_batched_and_a_single_one_is_answered_at_once():
    reading, writing = os.pipe()
    lines = line_command.LineReader(os.fdopen(reading, "rb"))
    chunks = lines.batches()
    os.write(writing, b"a\n")
    assert next(chunks) == [b"a"]
    os.write(writing, b"b\nc\nd\n")
    while lines._waiting.qsize() < 3:
        time.sleep(0.001)
    assert next(chunks) == [b"b", b"c", b"d"]
    os.write(writing, b"e")
    os.close(writing)
    assert [line for chunk in chunks for line in chunk] == [b"e"]


def test_process_answers_lines_as_they_arrive_and_exits_quietly(trained_logdir):
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "lingvo_gshard", "translate"),
            *(f"--logdir={trained_logdir}", _NOT_EMPTY),
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdin.write(b"Hund\n")
    process.stdin.flush()
    assert process.stdout.readline().endswith(b"\n")
    process.stdout.close()
    process.stdin.write(b"Hund\n")
    process.stdin.close()
    said = process.stderr.read()
    assert (process.wait(), said) == (1, b"")


def test_help_shows_examples_and_all_flags(capsys):
    with pytest.raises(SystemExit) as exit_:
        translate.main(["gshard-translate", "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    words = " ".join(out.replace("\\\n", "").split())
    assert "gshard-translate --logdir=runs/quickstart --input=lines.txt > translations.txt" in words
    for name in translate.define_flags():
        assert f"--{name}" in out


def test_averaged_weights_are_used_for_decoding(trained_logdir, tmp_path):
    run = Run(trained_logdir)
    source, params = SourceRun.read(run), run.params.copy()
    params.step.average_decay = 0.9
    moments = unflatten(source.trainer.state_specs().moments, source.checkpoint.moments, "moments")
    doubled = source.theta.transform(lambda weight: 2 * weight)
    state = NestedMap(theta=source.theta, moments=moments, averages=doubled)
    source.write(f"{tmp_path}/run", params, state, source.checkpoint.step)
    found = load(tmp_path / "run").model.theta.target_embedding.table
    np.testing.assert_array_equal(found, 2 * source.theta.target_embedding.table)


def test_a_terminal_shows_what_happens_before_the_answer(run_here, monkeypatch, capsys):
    class Screen(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", screen := Screen())
    code, out, _ = run_here(b"der Hund\n", "--json")
    assert code == 0 and json.loads(out)["source"] == "der Hund"
    assert "Starting" in screen.getvalue() and "Translating" in screen.getvalue()


@pytest.mark.slow
def test_a_line_of_three_million_characters_is_cut(run_here):
    marks = "e" + 150_000 * "\u0301\u0323"
    code, out, err = run_here(b"x" * 3_000_000 + b"\n" + marks.encode())
    assert code == 0 and out.count("\n") == 2
    for line in (1, 2):
        assert f"Warning: line {line} is longer than " in err
