# tests: wings/pages/html_page.py
"""Checks that shardings in words become mesh axes."""

import re

import pytest

from lingvo_gshard.wings.pages import html_page
from lingvo_gshard.wings.services.run_records import TensorSharding


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("replicated", {}),
        ("E->data", {"E": ["data"]}),
        ("E->data; H->model", {"E": ["data"], "H": ["model"]}),
        ("E->data, H->model", {"E": ["data"], "H": ["model"]}),
        (
            "B,G->fsdp,data; H->model",
            {"B": ["fsdp", "data"], "G": ["fsdp", "data"], "H": ["model"]},
        ),
        ("M->none; E -> data", {"M": [], "E": ["data"]}),
        ("E over data (8), H over model (2)", {"E": ["data"], "H": ["model"]}),
        ("B over fsdp and data (4 x 2)", {"B": ["fsdp", "data"]}),
    ],
)
def test_sharding_text_is_parsed(text, found):
    assert html_page.parse(text, {"data": 8, "model": 2, "fsdp": 4}) == found


@pytest.mark.parametrize("text", ["E->dta", "cut somehow", "E over dta (8)", "E->data; rest"])
def test_invalid_sharding_text_is_reported(text):
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        html_page.parse(text, {"data": 8})


def test_tensor_that_cannot_be_drawn_gives_the_reason():
    rows = [
        TensorSharding("a", "weights", "VM", (8, 4), "float32", split, 128, 32)
        for split in ("Z->data", "by hand", "V over data (4)", "replicated")
    ]
    found = html_page.describe("data=4", 4, rows)
    assert found["axes"] == [("data", 4)]
    first, second, *rest = found["splits"]
    assert "'Z->data' does not fit layout 'VM'" in first and "'by hand'" in second
    assert rest == [[["data"], []], [[], []]]
