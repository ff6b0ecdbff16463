# tests: wings/planning/picture/
"""Checks the HTML page of a plan: complete, without network access, and safe from injection."""

import base64
import hashlib
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gshard.wings.planning import picture
from tests.pages.elements import Elements, embedded
from tests.planning import example_plan


def test_page_contains_the_complete_plan():
    plan = example_plan.example_plan()
    page = picture.to_html(example_plan.as_plan(plan))
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


def test_mesh_of_wrong_size_is_rejected():
    plan = example_plan.example_plan() | {"mesh": "data=3"}
    with pytest.raises(ValueError, match="mesh 'data=3' does not have 512 devices"):
        picture.to_html(example_plan.as_plan(plan))


@pytest.mark.parametrize("strategy", example_plan.RULES)
def test_drawn_blocks_have_the_bytes_in_the_plan(strategy):
    plan = example_plan.example_plan(strategy)
    partitioning = embedded(picture.to_html(example_plan.as_plan(plan)))["mesh"]
    sizes = dict(partitioning["axes"])
    assert math.prod(sizes.values()) == 512
    for row, split in zip(plan["tensors"], partitioning["splits"], strict=True):
        parts = math.prod(sizes[axis] for axes in split for axis in axes)
        assert row["bytes_per_device"] * parts == row["bytes"], row["path"]
