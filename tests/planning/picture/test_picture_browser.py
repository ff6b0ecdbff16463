# tests: wings/planning/picture/
"""Uses the HTML page of a plan in a real browser."""

import dataclasses

import pytest

from lingvo_gshard.wings.planning import picture
from lingvo_gshard.wings.planning.loads.file import Loads
from lingvo_gshard.wings.planning.loads.rating import rate
from lingvo_gshard.wings.planning.training.goodput import plan_training
from lingvo_gshard.wings.planning.training.job import JobOptions
from tests.pages import audit, browser
from tests.planning import example_plan
from tests.planning.loads import example_loads
from tests.planning.loads.example_loads import choose, layer_of, record_of

pytestmark = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())


@pytest.fixture(scope="module")
def window():
    with browser.Browser() as opened:
        yield opened


@pytest.fixture
def page(window, tmp_path):
    """Returns a function that opens a plan's picture."""

    def open_plan(plan):
        path = tmp_path / "plan.html"
        path.write_text(picture.to_html(example_plan.as_plan(plan)), encoding="utf-8")
        window.open(path.as_uri())
        return window

    yield open_plan
    assert window.console() == []


def column(page, table, position):
    return page.texts(f"#{table} tbody td:nth-child({position})")


def test_every_section_is_drawn_without_network_requests(page):
    opened = page(example_plan.example_plan())
    assert opened.texts("h1") == ["gshard_paper.moe_512e_12l"]
    assert opened.texts(".answer") == ["It fits"]
    sections = opened.run("return [...document.querySelectorAll('section')].map((s) => s.id)")
    assert sections == [
        "memory", "time", "arithmetic", "communication", "sharding", "layers", "temporaries",
        "notes",
    ]  # fmt: skip
    assert opened.run("return performance.getEntriesByType('resource').length") == 0
    assert opened.run("return document.querySelectorAll('#memory .piece').length") == 6


def test_goodput_and_days_of_a_training_are_figures(page):
    record = example_plan.example_plan()
    options = JobOptions(tokens=1e12, failures="1e3", simulated_runs=50)
    found = plan_training(example_plan.as_plan(record), options)
    opened = page(record | {"goodput": dataclasses.asdict(found)})
    names, values = opened.texts(".figures dt"), opened.texts(".figures dd")
    assert names[-2:] == ["Goodput", "Days"]
    assert (
        values[-2] == f"{found.goodput.mean:.0%}".replace("%", " %") + "a failure every 3.91 hours"
    )
    assert "in 90% of simulated runs" in values[-1]


def test_time_under_the_loads_of_routers_is_a_figure(page):
    record = record_of(choose(1), 50, 6)
    layer = layer_of()
    found = rate(example_loads.plan(), [layer], Loads("load.json", {layer.path: [record]}))
    opened = page(example_plan.example_plan() | {"loads": dataclasses.asdict(found)})
    assert opened.texts(".figures dt")[-1] == "Time under loads"
    assert "in 90% of 1 steps of load.json, " in opened.texts(".figures dd")[-1]


def test_no_window_width_needs_horizontal_scrolling(page):
    opened = page(example_plan.example_plan("expert_tensor_fsdp"))
    assert opened.run("return document.documentElement.scrollWidth <= innerWidth")


def test_column_header_sorts_in_both_directions(page):
    plan = example_plan.example_plan()
    opened = page(plan)
    head = "#layer-table th:nth-child(1)"
    by_time = column(opened, "layer-table", 1)
    opened.click(f"{head} button")
    count = len(plan["layers"])
    assert column(opened, "layer-table", 1) == [str(count - row) for row in range(15)] != by_time
    opened.click(f"{head} button")
    assert column(opened, "layer-table", 1) == [str(row + 1) for row in range(15)]
    assert opened.run("return document.querySelector(arguments[0]).ariaSort", head) == "ascending"


def test_column_header_sorts_by_keyboard(page):
    opened = page(example_plan.example_plan())
    head = "#versions th:nth-child(1)"
    opened.type(f"{head} button", "\ue007")
    assert column(opened, "versions", 1) == ["jax", "libtpu", "lingvo_gshard"]
    opened.type(f"{head} button", "\ue00d")
    assert column(opened, "versions", 1) == ["lingvo_gshard", "libtpu", "jax"]


def test_filter_keeps_rows_with_every_word(page):
    plan = example_plan.example_plan()
    opened = page(plan)
    opened.type("#sharding input", "Decoder cross moments")
    wanted = [
        row["path"]
        for row in plan["tensors"]
        if row["kind"] == "moments" and "decoder" in row["path"] and "cross" in row["path"]
    ]
    assert opened.texts("#sharding .counted") == [
        f"{len(wanted)} of {len(plan['tensors'])} rows, 15 shown"
    ]
    opened.click("#sharding .quiet")
    assert sorted(column(opened, "tensors", 1)) == sorted(wanted)
    opened.type("#sharding input", " nowhere")
    assert column(opened, "tensors", 1) == ["No row holds that."]


def test_timeline_switches_between_bound_and_estimate(page):
    plan = example_plan.example_plan()
    opened = page(plan)

    def total():
        return opened.run(
            "return document.querySelector('svg.timeline').getAttribute('aria-label')"
        )

    assert f"{plan['seconds_per_step'] * 1e3:.0f} ms (estimate)" in total()
    widths = (
        "return [...document.querySelectorAll('.block rect')].map((r) => r.getAttribute('width'))"
    )
    estimated = opened.run(widths)
    opened.click("#time [data-value=bound]")
    assert f"{plan['seconds_per_step_bound'] * 1e3:.0f} ms (bound)" in total()
    assert opened.run(widths) != estimated
    assert "run beside all the rest" in opened.texts("#time > p")[0]
    assert opened.texts("#time [aria-pressed=true]") == ["Bound"]


def test_timeline_shows_loops_lanes_and_details(page):
    plan = example_plan.example_plan()
    opened = page(plan)
    loops = opened.texts(".loop text")
    assert len(loops) == 4 and all(text.startswith("× 3") for text in loops)
    moe = next(i for i, row in enumerate(plan["layers"]) if row["layer"].endswith("moe"))
    assert opened.run(f"return document.querySelectorAll('[data-index=\"{moe}\"]').length") == 2
    opened.hover(f"[data-index='{moe}']")
    (told,) = opened.texts(".tip")
    assert told.startswith("encoder/layers/body_1/moeforward, × 3 in a loop")
    opened.type("svg.timeline", "\ue011\ue014")
    second = plan["layers"][1]["layer"]
    assert opened.texts(".detail strong") == [second]


def test_timeline_zooms_by_buttons_keys_and_wheel(page):
    opened = page(example_plan.example_plan())
    width = "return parseFloat(document.querySelector('.window').style.width)"
    assert opened.run(width) == 100
    opened.click("[aria-label='Zoom in']")
    assert opened.run(width) == pytest.approx(60)
    opened.type("svg.timeline", "+")
    assert opened.run(width) == pytest.approx(36)
    opened.type("svg.timeline", "0")
    assert opened.run(width) == 100
    turn = (
        "const line = document.querySelector('svg.timeline'), box = line.getBoundingClientRect();"
        "line.dispatchEvent(new WheelEvent('wheel', {deltaY: -200, ctrlKey: arguments[0],"
        "clientX: box.left + box.width / 2, bubbles: true, cancelable: true}));"
    )
    opened.run(turn, False)
    assert opened.run(width) == 100
    opened.run(turn, True)
    assert opened.run(width) < 60


def test_selected_weight_is_drawn_on_the_mesh(page):
    plan = example_plan.example_plan("expert_tensor")
    opened = page(plan)
    opened.type("#sharding input", "decoder body[1].moe.w_out weights")
    opened.click("#tensors tbody tr button")
    assert opened.texts("#sharding h3") == ["decoder.layers.body[1].moe.w_out"]
    assert opened.texts(".mesh .dimensions li") == [
        "R 3 not split",
        "E 512 64 parts of 8 over data",
        "H 8,192 8 parts of 1,024 over model",
        "M 1,024 not split",
    ]
    drawn = opened.texts(".device .id")
    assert drawn == [str(row * 8 + column) for row in (0, 1, 2, 3, 4, 5, 63) for column in range(8)]
    opened.hover(".device:nth-of-type(10)")
    (told,) = opened.texts(".tip")
    assert told == "device 9data 1, model 1all of RE 8 to 15H 1,024 to 2,047all of M96 MiB"


def test_replicated_weight_is_the_same_on_every_device(page):
    opened = page(example_plan.example_plan())
    opened.type("#sharding input", "encoder.embedding.table weights")
    opened.click("#tensors tbody tr button")
    assert "Every one of the 512 devices holds all of it." in opened.texts(".mesh .about p")
    opened.hover(".device")
    assert opened.run("return document.querySelectorAll('.device.same').length") == 23


def test_hostile_text_is_displayed_but_never_executed(page):
    opened = page(example_plan.hostile())
    assert opened.run("return window.harmed") is None
    assert opened.run("return document.querySelectorAll('img').length") == 0
    assert opened.texts("h1") == [example_plan.HOSTILE]
    opened.type("svg.timeline", "\ue011")
    assert opened.texts(".detail strong") == [example_plan.HOSTILE]
    opened.hover("[data-index='0']")
    assert opened.texts(".tip strong") == [example_plan.HOSTILE]
    assert example_plan.hostile()["notes"] == opened.texts(".notes li")[:3]
    assert opened.run("return window.harmed") is None


def test_out_of_memory_plan_shows_suggestions(page):
    opened = page(example_plan.too_large())
    assert opened.texts(".answer") == ["It does not fit"]
    assert "2.18 GiB too much" in opened.texts(".verdict")[0]
    assert column(opened, "remedies-table", 2) == ["✓ yes", "✕ no"]


def test_nearly_empty_plan_is_drawn(page):
    plan = example_plan.example_plan()
    for rows in ("tensors", "largest_temporaries", "collectives", "layers", "notes", "remedies"):
        plan[rows] = []
    plan.update(budget=None, mfu=None, seconds_per_step=0.0, steps_per_second=None, mesh="")
    opened = page(plan)
    assert "The step has no collectives." in opened.texts("p")


def test_dark_mode_in_a_narrow_window(tmp_path):
    path = tmp_path / "plan.html"
    path.write_text(
        picture.to_html(example_plan.as_plan(example_plan.example_plan("expert_tensor"))),
        encoding="utf-8",
    )
    with browser.Browser(width=800, dark=True) as opened:
        opened.open(path.as_uri())
        assert (
            opened.run("return getComputedStyle(document.body).backgroundColor")
            == "rgb(18, 21, 24)"
        )
        assert opened.run("return document.documentElement.scrollWidth <= innerWidth")
        assert opened.console() == []


@pytest.mark.slow
def test_a_plan_is_readable_on_phones_and_desks_in_light_and_dark(tmp_path):
    path = tmp_path / "plan.html"
    path.write_text(
        picture.to_html(example_plan.as_plan(example_plan.example_plan())), encoding="utf-8"
    )
    assert audit.problems_on_screens(lambda opened: opened.open(path.as_uri())) == []
