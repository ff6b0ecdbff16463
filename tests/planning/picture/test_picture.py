"""Checks the HTML page of a plan: complete, without network access, and safe from injection."""

import base64
import hashlib
import html.parser
import importlib.resources
import json
import math
import re

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gshard.planning import picture
from lingvo_gshard.planning.picture import splits
from tests.planning import example_plan


class Elements(html.parser.HTMLParser):
    """Collects every element with its attributes and the content of scripts and styles."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.inside = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append([tag, dict(attrs), ""])
        self.inside = True

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.found[-1][2] += data

    def all(self, tag):
        return [(attributes, text) for name, attributes, text in self.found if name == tag]


def embedded(page):
    """Returns the data that the page's own script reads."""
    ((_, text),) = [one for one in Elements(page).all("script") if one[0].get("id") == "plan"]
    return json.loads(text)


def test_html_file_contains_the_complete_plan(tmp_path):
    plan = example_plan.example_plan()
    picture.write(example_plan.as_plan(plan), tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert embedded(page)["plan"] == plan
    assert Elements(page).all("title") == [({}, "gshard_paper.moe_512e_12l on v3:16x16")]


def test_page_loads_nothing_and_runs_only_its_own_script():
    elements = Elements(picture.to_html(example_plan.as_plan(example_plan.example_plan())))
    for _, attributes, _ in elements.found:
        assert "src" not in attributes
        assert attributes.get("href", "data:").startswith("data:")
        assert not any(name.startswith("on") for name in attributes)
    policy = next(a["content"] for a, _ in elements.all("meta") if "http-equiv" in a)
    (script,) = [text for attributes, text in elements.all("script") if not attributes]
    ((_, style),) = elements.all("style")
    for kind, text in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")


def test_no_script_reads_text_as_html():
    for file in importlib.resources.files(picture).iterdir():
        if file.name.endswith(".js"):
            text = file.read_text(encoding="utf-8")
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text
            )
            assert "</script" not in text and "<!--" not in text, file.name


@hypothesis.given(st.text(alphabet=st.sampled_from("</script>!-&\"'{}NAMEPLAN\u2028 \\")))
@hypothesis.example("</script><script>alert(1)</script>")
@hypothesis.example("{{SCRIPT}} <!--<script>")
def test_text_cannot_close_its_element(text):
    plan = example_plan.example_plan()
    plain = Elements(picture.to_html(example_plan.as_plan(plan))).found
    plan["name"] = plan["layers"][0]["layer"] = text
    plan["notes"] = [text]
    page = picture.to_html(example_plan.as_plan(plan))
    assert [tag for tag, *_ in Elements(page).found] == [tag for tag, *_ in plain]
    assert embedded(page)["plan"] == plan


def test_mesh_of_wrong_size_is_rejected(tmp_path):
    plan = example_plan.example_plan() | {"mesh": "data=3"}
    with pytest.raises(ValueError, match="mesh 'data=3' does not have 512 devices"):
        picture.write(example_plan.as_plan(plan), tmp_path / "plan.html")
    assert not list(tmp_path.iterdir())


def test_unwritable_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="--html=.*nowhere.*No such file"):
        picture.write(
            example_plan.as_plan(example_plan.example_plan()), tmp_path / "nowhere" / "plan.html"
        )


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
    assert splits.parse(text, {"data": 8, "model": 2, "fsdp": 4}) == found


@pytest.mark.parametrize("text", ["E->dta", "cut somehow", "E over dta (8)", "E->data; rest"])
def test_invalid_sharding_text_is_reported(text):
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        splits.parse(text, {"data": 8})


@pytest.mark.parametrize("strategy", example_plan.RULES)
def test_drawn_blocks_have_the_bytes_in_the_plan(strategy):
    plan = example_plan.example_plan(strategy)
    partitioning = embedded(picture.to_html(example_plan.as_plan(plan)))["mesh"]
    sizes = dict(partitioning["axes"])
    assert math.prod(sizes.values()) == 512
    for row, split in zip(plan["tensors"], partitioning["splits"], strict=True):
        parts = math.prod(sizes[axis] for axes in split for axis in axes)
        assert row["bytes_per_device"] * parts == row["bytes"], row["path"]


def test_tensor_that_cannot_be_drawn_gives_the_reason():
    plan = example_plan.example_plan()
    plan["tensors"][0]["split"] = "Z->data"
    plan["tensors"][1]["split"] = "by hand"
    first, second, *rest = splits.describe(example_plan.as_plan(plan))["splits"]
    assert "'Z->data' does not fit layout 'VM'" in first and "'by hand'" in second
    assert all(isinstance(split, list) for split in rest)
