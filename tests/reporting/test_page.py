# tests: wings/reporting/page/
"""Checks the page of a report: complete, small, loading nothing, and safe from hostile text."""

import base64
import hashlib
import json

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from lingvo_gshard.wings.reporting import page
from lingvo_gshard.wings.reporting.runs_report import read_report
from tests.pages.elements import Elements, embedded
from tests.reporting import example_runs


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return read_report([example_runs.write_run(tmp_path_factory.mktemp("runs") / "run")])


def test_page_contains_the_complete_report(report):
    text = page.to_html(report)
    assert embedded(text)["report"] == json.loads(msgspec.json.encode(report))
    assert Elements(text).all("title") == [({}, "test.example: run")]


def test_page_loads_nothing_and_runs_only_its_own_script(report):
    elements = Elements(page.to_html(report))
    for _, attributes, _ in elements.found:
        assert "src" not in attributes
        assert attributes.get("href", "data:").startswith("data:")
        assert not any(name.startswith("on") for name in attributes)
    policy = next(a["content"] for a, _ in elements.all("meta") if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; ")
    (script,) = [text for attributes, text in elements.all("script") if not attributes]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


@hypothesis.given(st.text(alphabet=st.sampled_from("</script>!-&\"'{}NAMEDATA\u2028 \\")))
@hypothesis.example(example_runs.HOSTILE)
@hypothesis.example("{{SCRIPT}} <!--<script>")
def test_text_cannot_close_its_element(report, text):
    plain = [tag for tag, *_ in Elements(page.to_html(report)).found]
    run = msgspec.structs.replace(report.runs[0], experiment=text, label=text, params={text: text})
    made = page.to_html(msgspec.structs.replace(report, runs=[run]))
    assert [tag for tag, *_ in Elements(made).found] == plain
    assert embedded(made)["report"]["runs"][0]["experiment"] == text


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 8])
def test_page_of_a_long_run_of_a_deep_model_is_small(tmp_path, count):
    metrics = ("auxiliary_loss", "router_entropy", "load_max_over_mean", "dropped_share")
    names = [f"decoder.layers[{layer}].moe/{metric}" for layer in range(36) for metric in metrics]
    runs = []
    for seed in range(count):
        run = example_runs.write_run(tmp_path / str(seed), 10, seed)
        with open(run / "metrics.jsonl", "w", encoding="utf-8") as file:
            for step in range(1, 16_000 // count + 1):
                row = example_runs.metrics(step, 16_000, seed)
                layers = {name: 0.1234567 + step % 7 + place for place, name in enumerate(names)}
                file.write(json.dumps(row | layers) + "\n")
        runs.append(run)
    assert len(page.to_html(read_report(runs)).encode()) < 1_000_000
