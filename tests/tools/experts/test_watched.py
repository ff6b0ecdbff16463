"""Tests gshard-experts watched: tables of the records that training left."""

import json

import msgspec
import pytest

from lingvo_gshard.tools import experts
from lingvo_gshard.tools.console import startup
from lingvo_gshard.wings.services.routers.router_records import ROUTERS_FILE, RouterRecord

LAYERS = ("encoder.layers[1].feed_forward", "decoder.layers[1].feed_forward")


def record(step, layer, choices, **fields):
    given = dict(
        router="Top2Router",
        experts_per_token=2.0,
        tokens=10,
        kept=choices,
        dropped_share=0.25,
        load_entropy=1.2,
        token_entropy=0.75,
    )
    return RouterRecord(step=step, layer=layer, choices=choices, **{**given, **fields})


@pytest.fixture
def logdir(tmp_path):
    """Returns a run whose decoder collapses between steps 10 and 20."""
    records = [
        record(10, LAYERS[0], [5, 5, 6, 4], balance_loss=0.075, balance_floor=1 / 16),
        record(10, LAYERS[1], [5, 5, 5, 5], token_entropy=None),
        record(20, LAYERS[0], [5, 5, 6, 4]),
        record(
            20,
            LAYERS[1],
            [1, 19, 0, 0],
            dead_since={2: 10, 3: 20},
            by_language={"de": [0, 10, 0, 0], "es[a]": [1, 9, 0, 0]},
            by_class={"digits": [1, 19, 0, 0]},
        ),
    ]
    rows = b"".join(msgspec.json.encode(one) + b"\n" for one in records)
    (tmp_path / ROUTERS_FILE).write_bytes(rows)
    return tmp_path


def show(capsys, logdir, *flags):
    """Returns exit code, output and errors of the command."""
    arguments = ["gshard-experts", "watched", f"--logdir={logdir}", *flags]
    code = startup.guarded("gshard-experts", experts.main)(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def row_of(text, name):
    (line,) = [line for line in text.splitlines() if line.strip().startswith(name)]
    return line.split()


def test_a_row_for_each_layer_of_the_last_watched_step(capsys, logdir):
    code, out, _ = show(capsys, logdir)
    assert code == 0 and "2 watched steps, 10 to 20" in out
    assert row_of(out, "decoder") == [
        *(LAYERS[1], "Top2Router", "1", "(95.0%)", "25.0%", "3.3", "of", "4", "25.0%", "0.75"),
        *("-", "2", "since", "10,", "3", "since", "20", "▁█"),
    ]
    assert row_of(out, "encoder")[-2:] == ["none", "▁▁"]


def test_an_earlier_step(capsys, logdir):
    _, out, _ = show(capsys, logdir, "--step=10", "--layer=layers[1]")
    assert "1 watched step, 10 to 10" in out
    assert row_of(out, "encoder")[10:12] == ["+20.0%", "none"]
    assert row_of(out, "decoder")[9] == "-"


def test_languages_and_classes_of_a_layer(capsys, logdir):
    _, out, _ = show(capsys, logdir, "--by=language", "--layer=decoder")
    assert LAYERS[1] in out and LAYERS[0] not in out
    assert row_of(out, "es[a]") == ["es[a]", "10", "5.0%", "1", "(90%)", "0", "(10%)"]
    assert row_of(out, "all")[1] == "20"
    assert row_of(show(capsys, logdir, "--by=class")[1], "digits")[1] == "20"


def test_json_has_all_records(capsys, logdir):
    code, out, errors = show(capsys, logdir, "--json")
    assert code == 0 and "watched steps" in errors
    assert [row["step"] for row in json.loads(out)] == [10, 10, 20, 20]


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--by=langage"], "--by=langage is unknown. Did you mean 'language'?"),
        (["--step=14"], "--step=14 was not watched. The nearest one is 10"),
        (["--layer=decodr"], "--layer=decodr is in no path of a layer with experts."),
    ],
)
def test_wrong_flags(capsys, logdir, flags, error):
    code, _, errors = show(capsys, logdir, *flags)
    assert code == 1 and error in errors


def test_a_run_without_records(capsys, tmp_path):
    code, _, errors = show(capsys, tmp_path)
    assert code == 1 and "has no records of watched routers" in errors
