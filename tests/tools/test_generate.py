# tests: tools/generate.py, tools/console/line_command.py
"""Tests gshard-generate through its command line on a tiny language model."""

import dataclasses
import json
import sys

import pytest

from lingvo_gshard.api.run import Run, load
from lingvo_gshard.tools import generate
from lingvo_gshard.tools.console import startup
from lingvo_gshard.tools.console.line_command import write
from lingvo_gshard.wings.inference.options import DRAWING, DecodingOptions
from tests.tools.standard_input import StandardInput

# One process runs all tests of this file, so that they share their fixtures.
pytestmark = pytest.mark.xdist_group("language_model_logdir")

LIKELIEST = DecodingOptions(beam_size=1)


@pytest.fixture(scope="module")
def trained(language_model_logdir):
    """Returns the run, whose model is restored and compiled once for all tests."""
    return load(language_model_logdir)


@pytest.fixture
def run_here(language_model_logdir, trained, monkeypatch, capsys):
    """Returns a function from (input, flags) to (exit code, standard output, standard error)."""
    monkeypatch.setattr(Run, "decoder", trained.decoder)
    monkeypatch.setattr(Run, "model", trained.model)

    def run(content, *flags):
        monkeypatch.setattr(sys, "stdin", StandardInput(content))
        name = "gshard-generate"
        arguments = [name, f"--logdir={language_model_logdir}", *flags]
        code = startup.guarded(name, generate.main)(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_each_prompt_is_continued(run_here, tmp_path):
    code, out, err = run_here(b"the dog\n\nthe cat\n", "--best=2", "--seed=3")
    assert code == 0 and err == ""
    lines = out.removesuffix("\n").split("\n")
    assert len(lines) == 6
    assert all(line.startswith("the dog") for line in lines[:2])
    assert all(line.startswith("the cat") for line in lines[4:])
    code, again, _ = run_here(b"the cat\n", "--best=2", "--seed=3", "--json")
    assert code == 0
    record = json.loads(again)
    assert record["beginning"] == "the cat" and record["texts"] == lines[4:]
    for text, best in zip(lines[4:], record["best"], strict=True):
        assert best["text"] == text
        assert len(best["log_probabilities"]) == len(best["tokens"]) + (best["reason"] == "end")
        assert sum(best["log_probabilities"]) == pytest.approx(best["score"], abs=1e-4)
    assert run_here(b"the cat\n", "--best=2", "--seed=4", "--json")[1] != again
    file = tmp_path / "texts.jsonl"
    _, texts, _ = run_here(b"the cat\n", "--best=2", "--seed=3", f"--json={file}")
    assert texts.splitlines() == lines[4:]
    assert file.read_text() == again


def test_a_line_without_a_seed_draws_one_and_tells_it(run_here):
    """Equal lines get different texts; --seed=0 is a seed."""
    _, out, err = run_here(b"the\n" * 5, "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert err == "" and len({record["seed"] for record in records}) == 5
    assert len({record["texts"][0] for record in records}) > 2
    for record in records[:2]:
        _, again, _ = run_here(b"the\n", f"--seed={record['seed']}", "--json")
        assert json.loads(again)["texts"] == record["texts"]
    _, text, told = run_here(b"the\n")
    seed = told.split()[1].rstrip(":")
    assert told == f"Seed {seed}: --seed={seed} writes this again\n"
    assert run_here(b"the\n", f"--seed={seed}")[1:] == (text, "")
    _, first, _ = run_here(b"the\n", "--seed=0", "--json")
    assert json.loads(first)["seed"] == 0 and run_here(b"the\n", "--seed=0", "--json")[1] == first
    _, likeliest, told = run_here(b"the\n", "--temperature=0", "--json")
    assert "seed" not in json.loads(likeliest) and told == ""


def test_temperature_0_generates_the_likeliest_tokens(trained):
    """At temperature 0 every generated token has the highest probability."""
    few = dataclasses.replace(LIKELIEST, most_tokens=5)
    (text,) = trained.text_generator(few).write(["the"])
    vocabulary = trained.input.vocabulary
    (generated,) = trained.text_generator(LIKELIEST).write(["the"])
    assert generated.texts[0].startswith(text.texts[0]) and text.cut == 0
    written = vocabulary.encode(text.texts[0])[len(vocabulary.encode("the")) :]
    assert 0 < len(written) <= 5


def test_a_text_ends_before_a_stop_string(trained):
    (whole,) = trained.text_generator(LIKELIEST).write(["the"])
    continued = whole.texts[0].removeprefix("the")
    stop = continued[len(continued) // 2 :][:2]
    options = dataclasses.replace(LIKELIEST, stop=(stop,))
    (stopped,) = trained.text_generator(options).write(["the"])
    assert stop and stopped.texts == ["the" + continued[: continued.index(stop)]]


def test_streamed_pieces_make_the_text(trained):
    for options in (dataclasses.replace(DRAWING, seed=3), LIKELIEST):
        (text,) = trained.text_generator(options).write(["the dog"])
        assert (
            "the dog" + "".join(trained.text_generator(options).stream("the dog")) == text.texts[0]
        )


def test_texts_appear_while_they_are_generated(run_here, tmp_path, monkeypatch):
    """One line alone, and several with --stream, give what they give without it."""
    file, records = tmp_path / "beginnings.txt", tmp_path / "texts.jsonl"
    file.write_bytes(b"the dog\nthe cat\n")
    flags = ("--seed=3", f"--input={file}")
    _, expected, _ = run_here(b"", *flags)
    written = []
    monkeypatch.setattr(generate, "write", lambda text: written.append(text) or write(text))
    code, out, err = run_here(b"", *flags, "--stream", f"--json={records}")
    assert (code, out, err) == (0, expected, "")
    assert len(written) > 4 and written[0].startswith("the dog")
    found = [json.loads(line)["texts"] for line in records.read_text().splitlines()]
    assert [text for (text,) in found] == expected.splitlines()
    written.clear()
    _, out, _ = run_here(b"the dog\n", "--seed=3")
    assert out == expected.splitlines(keepends=True)[0] and len(written) > 2


def test_beams_and_restricted_tokens_as_in_translating(run_here, trained):
    vocabulary = trained.input.vocabulary
    ids = [index for index in range(vocabulary.size) if index != vocabulary.eos_id][4:10]
    flags = ("--temperature=0", "--beam_size=3", "--best=2", "--json", "--most_tokens=5")
    allowed = f"--allowed_tokens={','.join(map(str, ids[:5]))}"
    _, out, _ = run_here(
        b"the\n", *flags, allowed, "--least_tokens=5", f"--forbidden_tokens={ids[0]}"
    )
    best = json.loads(out)["best"]
    assert len(best) == 2 and best[0]["score"] >= best[1]["score"]
    pieces = {vocabulary.piece(index) for index in ids[1:5]}
    for found in best:
        assert set(found["tokens"]) <= pieces and len(found["log_probabilities"]) == 5


def test_long_prompts_are_truncated_at_the_start(run_here, trained):
    vocabulary = trained.input.vocabulary
    beginning = "the dog sees the cat and the cat sees the dog"
    tokens = len(vocabulary.encode(beginning))
    code, out, err = run_here(beginning.encode() + b"\n", "--most_tokens=6", "--seed=1")
    assert code == 0 and out.startswith(beginning)
    # Of 16 positions, new tokens take 6 but for the last one.
    assert err == (
        f"Warning: line 1 leaves no room: the model did not see its first {tokens - 11} tokens\n"
    )


def test_a_text_does_not_depend_on_the_others(trained):
    many = [f"the {i}" for i in range(12)]
    generator = trained.text_generator(dataclasses.replace(DRAWING, seed=0))
    found = [text.texts for text in generator.write(many)]
    assert found == [text.texts for one in many for text in generator.write([one])]


def test_multiline_text_is_written_as_one_line():
    assert generate._on_one_line("a\nb\\c\rd") == "a\\nb\\\\c\\rd"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temperature=-1"], "--temperature=-1"),
        (["--top_p=2"], "--top_p=2.0: a number above 0 and of 1 at most"),
        (["--most_tokens=17"], "most_tokens is 17; 0 to 16, a row"),
        (["--on_bad_line=skipp"], "--on_bad_line=skipp is unknown. Did you mean 'skip'?"),
        (["--logdir=/no/such"], "there is no such directory"),
        (["--stream", "--best=2"], "it needs --best=1 and --beam_size=1"),
        (["--temperature=0", "--best=2"], "best is 2, but a search with beam_size=1 finds 1"),
        (["--input=no_such.txt"], "--input=no_such.txt: No such file or directory"),
        (["the"], "'the' is not a flag"),
    ],
)
def test_user_errors_are_one_line(flags, words, run_here):
    code, out, err = run_here(b"the\n", *flags)
    assert code == 1 and out == ""
    assert err.startswith("gshard-generate: error: ") and err.count("\n") == 1
    assert words in err


def test_invalid_utf8_line_is_reported(run_here):
    code, out, err = run_here(b"the\n\xff\nthe\n")
    assert code == 1 and out.count("\n") == 1
    assert "line 2 is not UTF-8 (byte 1); --on_bad_line=skip" in err
    code, out, err = run_here(b"the\n\xff\nthe\n", "--on_bad_line=skip")
    assert code == 0 and out.count("\n") == 3


def test_help_shows_examples_and_all_flags(capsys):
    with pytest.raises(SystemExit) as exit_:
        generate.main(["gshard-generate", "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert 'echo "Cannot open" | gshard-generate --logdir=runs/language_model' in out
    for name in generate.define_flags():
        assert f"--{name}" in out
