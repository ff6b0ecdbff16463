# tests: wings/services/routers/watch.py
"""Tests the pictures of routers."""

import numpy as np

from lingvo_gshard.wings.services.routers import watch


def test_colors_tell_no_load_an_even_load_and_all_of_it():
    shares = np.array([[0.0, 0.25, 0.01], [1.0, 0.25, 0.5]])
    found = watch.heat_map(shares, experts=4)
    cell = 16
    assert found.shape == (2 * cell, 3 * cell, 3) and found.dtype == np.uint8
    squares = found[::cell, ::cell].astype(int)
    red, even = squares[0, 0], squares[0, 1]
    assert red[0] > 150 > red[2]
    assert (squares[1, 1] == even).all() and (found[:cell, cell : 2 * cell] == even).all()
    # More load is darker.
    assert squares[0, 2].sum() > even.sum() > squares[1, 2].sum() > squares[1, 0].sum()


def test_large_pictures_have_small_squares():
    assert watch.heat_map(np.full((300, 200), 0.1), 300).shape == (600, 400, 3)


def test_rows_are_kinds_of_tokens():
    found = watch.by_kind({"de": [4, 0], "es": [1, 1], "gl": [0, 0]})
    assert found.shape == (48, 32, 3)
    even = watch.heat_map(np.array([[0.5]]), 2)[0, 0]
    assert (found[16, 0] == even).all() and not (found[0, 0] == even).all()


def test_a_long_history_is_averaged_to_few_columns():
    history = watch.LoadHistory()
    given = np.random.default_rng(1).random((1000, 3))
    for index, load in enumerate(given, 1):
        history.add(load)
        assert history.table().shape[1] <= 256
        if index == 200:
            np.testing.assert_array_equal(history.table(), given[:200].T)
    table = history.table()
    # 8 steps per column after three halvings, or 4 after two.
    width = round(1000 / table.shape[1])
    np.testing.assert_allclose(table[:, 5], given[5 * width : 6 * width].mean(0))
    np.testing.assert_allclose(table[:, 0], given[:width].mean(0))
