"""Tests the records of watched routers."""

import math

import msgspec

from lingvo_gshard.wings.services.routers.router_records import (
    ROUTERS_FILE,
    RouterRecord,
    routers_of_run,
)


def record(step=50, choices=(3, 1, 0, 4), **fields):
    """Returns a record of a layer with these choices."""
    given = dict(
        step=step,
        layer="encoder.layers[1].feed_forward",
        router="Top2Router",
        experts_per_token=2.0,
        tokens=sum(choices),
        choices=list(choices),
        kept=list(choices),
        dropped_share=0.0,
        load_entropy=0.9,
    )
    return RouterRecord(**{**given, **fields})


def test_reader_returns_what_was_written_without_damaged_rows(tmp_path):
    assert routers_of_run(tmp_path) == []
    first = record(dead_since={2: 10}, by_language={"es": [1, 0, 0, 2]}, balance_loss=0.02)
    second = record(step=100, token_entropy=None)
    rows = [msgspec.json.encode(r) + b"\n" for r in (first, second)]
    (tmp_path / ROUTERS_FILE).write_bytes(rows[0] + b'{"step": 60}\n' + rows[1] + rows[0][:40])
    assert routers_of_run(tmp_path) == [first, second]


def test_shares_are_of_all_choices():
    found = record()
    assert found.num_experts == 4
    assert found.load.tolist() == [3 / 8, 1 / 8, 0, 0.5]
    assert found.busiest == (3, 0.5)
    assert record(choices=(0, 0)).busiest == (0, 0.0)


def test_distance_is_relative_to_the_loss_of_an_even_load():
    assert record().balance_distance is None
    found = record(balance_loss=0.125, balance_floor=1 / 16)
    assert math.isclose(found.balance_distance, 1.0)
