# tests: /docs/pictures/
"""Tests the pictures of the documentation: drawn ones are up to date, all are shown and exist."""

import itertools
import pathlib
import re
import xml.etree.ElementTree

import numpy as np
import pytest

from docs.pictures import __main__ as pictures
from docs.pictures import all_to_all, curve, families, routing, study, texts, weight_cut
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.services.routers.router_records import RouterRecord

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", pictures.DRAWN)
def test_committed_pictures_are_what_the_code_draws(name):
    committed = (pictures.FOLDER / name).read_text(encoding="utf-8")
    assert pictures.DRAWN[name]() == committed, f"{name} is out of date: make pictures"


@pytest.mark.parametrize("path", sorted(pictures.FOLDER.glob("*.svg")), ids=lambda path: path.name)
def test_pictures_are_self_contained_and_say_what_they_show(path):
    root = xml.etree.ElementTree.parse(path).getroot()
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"<script|href=|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert root.find(f"{SVG}title").text and len(root.find(f"{SVG}desc").text) > 80
    width, height = int(root.get("width")), int(root.get("height"))
    for element in root.iter(f"{SVG}text"):
        assert 0 <= float(element.get("x")) <= width and 0 <= float(element.get("y")) <= height


def test_pages_show_every_picture_with_a_text_for_those_who_cannot_see_it():
    shown = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        names = re.findall(r"!\[([^\]]*)\]\(([\w./]+)\)", text)
        names += re.findall(r'<img alt="([^"]*)" src="([\w./]+)"', text)
        names += [("source", name) for name in re.findall(r'srcset="([\w./]+)"', text)]
        for described, name in names:
            path = (page.parent / name).resolve()
            assert described and path.is_file(), f"{page.name}: {name}"
            shown.add(path)
    drawn = [*pictures.FOLDER.glob("*.svg"), *pictures.FOLDER.glob("*.png")]
    assert shown == {path.resolve() for path in drawn}


def test_blocks_of_a_weight_are_disjoint_and_cover_it():
    mesh, shape = Mesh.parse("data=4,model=2"), (8, 6, 4)
    split = Partitioning.make(str(mesh), "expert_tensor").split("EMH")
    counts = np.zeros(shape, int)
    for device in range(mesh.size):
        counts[np.ix_(*weight_cut.block(shape, split, mesh, device))] += 1
    assert (counts == 1).all()
    # The last axis of the mesh varies fastest, as in jax.sharding.Mesh.
    assert weight_cut.block(shape, split, mesh, 1) == [range(2), range(6), range(2, 4)]


def test_slots_hold_the_kept_tokens_of_each_expert():
    routed = all_to_all.route()
    capacity = routed.filled_GEC.shape[2]
    groups, experts = range(all_to_all.GROUPS), range(all_to_all.EXPERTS)
    for group, expert in itertools.product(groups, experts):
        chosen = int((routed.expert_GS[group] == expert).sum())
        assert routed.filled_GEC[group, expert].sum() == min(chosen, capacity)
    assert 0 < (~routed.kept_GS).sum() < 4, "the picture explains a dropped token"


def test_curve_draws_means_of_steps_within_its_panel():
    rows = [
        {"step": n + 1, "cross_entropy": 4.0 / (n + 1), "accuracy": n / 100, "tokens": 10.0}
        | {"learning_rate": 0.002}
        for n in range(60)
    ]
    rows[-1] |= {"dev/cross_entropy": 1.0, "dev/accuracy": 0.5}
    means = [sum(4.0 / (n + 1) for n in range(i, i + 20)) / 20 for i in (0, 20, 40)]
    assert curve.points(rows, "cross_entropy") == pytest.approx(
        list(zip((10.5, 30.5, 50.5), means, strict=True))
    )
    text = curve.draw("a.run", rows)
    assert "The training of a.run" in text and "60 steps" in text and "dev 1.00" in text
    assert curve.ticks(8.1, 7) == [0, 2, 4, 6, 8] and curve.ticks(0.004, 2) == [0, 0.002, 0.004]


def test_the_map_of_families_has_a_number_for_each_pair_that_there_is():
    overlap = {"within": 0.7, "between": 0.4, "families": {"A": {"A": 0.7, "B": 0.4}}}
    overlap["families"]["B"] = {"A": 0.4}
    layers = [{"path": name, "num_experts": 4, "family_overlap": overlap} for name in "xy"]
    root = xml.etree.ElementTree.fromstring(families.draw("test", layers))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert texts.count("70") == 2 and texts.count("40") == 4
    assert "x, 4 experts: 70% within a family, 40% between families" in texts


def _watched(step, layer, words, dots):
    choices = [one + other for one, other in zip(words, dots, strict=True)]
    return RouterRecord(
        step=step,
        layer=layer,
        router="Top2Router",
        experts_per_token=1.0,
        tokens=sum(choices),
        choices=choices,
        kept=choices,
        dropped_share=0.25,
        load_entropy=0.0,
        token_entropy=0.5,
        by_class={"word": words, "punctuation": dots},
    )


def test_shares_of_classes_are_of_all_choices_of_the_last_records():
    records = [_watched(1, "x", [8, 0], [0, 2]), _watched(2, "x", [0, 8], [6, 0])]
    shares = routing.class_shares(records)
    assert list(shares) == ["word", "punctuation", "all tokens"]
    np.testing.assert_allclose(shares["word"], [0.5, 0.5])
    np.testing.assert_allclose(shares["punctuation"], [0.75, 0.25])
    np.testing.assert_allclose(shares["all tokens"], [14 / 24, 10 / 24])
    root = xml.etree.ElementTree.fromstring(routing.draw_classes("a_run", records))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert texts.count("50") == 2 and {"75", "25", "58", "42"} <= set(texts)


def test_curves_of_routers_are_drawn_over_those_of_the_first_run():
    even = [_watched(1, layer, [2, 2], [2, 2]) for layer in "xy"]
    uneven = [_watched(1, layer, [6, 2], [2, 2]) for layer in "xy"]
    root = xml.etree.ElementTree.fromstring(routing.draw_changes({"even": even, "uneven": uneven}))
    assert "uneven: busiest 1.33 times the mean, 25.0% dropped, entropy 0.50 nats" in [
        element.text for element in root.iter(f"{SVG}text")
    ]
    curves = [line for line in root.iter(f"{SVG}polyline") if line.get("class") == "s0"]
    assert len(curves) == 2
    # The highest load, 4/3, is at the top of its panel.
    heights = {float(line.get("points").split(",")[1]) for line in curves}
    assert heights == {130.0}


def _study_run(model, chrf, perplexity, language="", parameters=1_000_000):
    scores = {"rows": 5, "perplexity": perplexity, "chrf": chrf, "bleu": 1.0}
    return {
        "model": model,
        "language": language,
        "step": 8000,
        "parameters": parameters,
        "thirds": dict.fromkeys(("all", "most text", "middle", "least text"), scores),
        "languages": {"it": scores},
    }


def test_a_study_is_drawn_relative_to_its_first_model():
    runs = [
        _study_run("dense", 20.0, 60.0),
        _study_run("dense", 22.0, 40.0),
        _study_run("experts_8", 24.0, 45.0, parameters=3_500_000),
        _study_run("bilingual", 11.0, 90.0, language="it"),
    ]
    assert study.changes(runs, "dense", "all", "perplexity") == pytest.approx([0.2, -0.2])
    assert study.changes(runs, "experts_8", "all", "perplexity") == pytest.approx([-0.1])
    assert study.changes(runs, "experts_8", "middle", "chrf") == pytest.approx([3.0])
    root = xml.etree.ElementTree.fromstring(study.draw(runs))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert texts.count("dense, 1.0M") == texts.count("experts_8, 3.5M") == 2
    assert "-20%" in texts and "+3.0" in texts


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(-0.44, 0, [-0.5, -0.4, -0.3, -0.2, -0.1, 0]), (0, 3.1, [0, 1, 2, 3, 4]), (0, 0, [0, 1e-6])],
)
def test_ticks_are_round_and_enclose_the_range(low, high, expected):
    found = study.round_ticks(low, high)
    if high > low:
        assert found == pytest.approx(expected)
    assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 7


def test_kinds_of_text_have_a_bar_for_each_model():
    def run(model, books, news):
        perplexity = {"books": books, "news": news, "all": (books + news) / 2}
        tokens = {"books": 10, "news": 30, "all": 40}
        return {"model": model, "step": 9, "parameters": 10**6} | {
            "perplexity": perplexity,
            "tokens": tokens,
        }

    runs = [run("dense", 20.0, 60.0), run("dense", 20.0, 40.0), run("experts_8", 15.0, 55.0)]
    assert texts.change(runs, "experts_8", "books") == pytest.approx(-0.25)
    assert texts.change(runs, "experts_8", "news") == pytest.approx(0.1)
    root = xml.etree.ElementTree.fromstring(texts.draw(runs))
    drawn = [element.text for element in root.iter() if element.text]
    assert "experts_8, 1.0M" in drawn and "-25.0%" in drawn
    assert drawn.index("all") < drawn.index("news") < drawn.index("books")


def test_gains_compare_each_bilingual_model_with_the_mean_of_the_largest():
    runs = [
        _study_run("dense", 20.0, 60.0),
        _study_run("experts_8", 24.0, 45.0, parameters=3_500_000),
        _study_run("experts_8", 26.0, 45.0, parameters=3_500_000),
        _study_run("bilingual", 11.0, 90.0, language="it"),
    ]
    root = xml.etree.ElementTree.fromstring(study.draw_gains(runs))
    assert "it 11.0 and 25.0." in root.find(f"{SVG}desc").text
    widths = [float(r.get("width")) for r in root.iter(f"{SVG}rect") if r.get("height") == "16"]
    assert widths[0] / widths[1] == pytest.approx(11 / 25, abs=0.001)
