# tests: wings/reporting/page/
"""Uses the page of a report in a real browser."""

import shutil

import pytest

from lingvo_gshard.wings.reporting import page as report_page
from lingvo_gshard.wings.reporting.runs_report import read_report
from tests.pages import audit, browser
from tests.reporting import example_runs

pytestmark = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())

# One test in each change; all of them take half a minute.
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def window():
    with browser.Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [
        example_runs.write_run(folder / name, steps, seed)
        for name, steps, seed in (("first", 400, 1), ("second", 1500, 2))
    ]


def write(path, logdirs):
    path.write_text(report_page.to_html(read_report(logdirs)), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def page(window, tmp_path):
    """Returns a function that opens the report of some runs."""

    def open_report(*logdirs):
        window.open(write(tmp_path / "report.html", logdirs))
        return window

    yield open_report
    assert window.console() == []


def fits(opened):
    return opened.run("return document.documentElement.scrollWidth <= innerWidth")


def chart(title):
    """Returns a script's expression for the chart with a title."""
    return (
        "[...document.querySelectorAll('.chart')]"
        f".find((c) => c.querySelector('.title').textContent === '{title}')"
    )


def readout(opened, title):
    return opened.run(
        f"return [...{chart(title)}.querySelectorAll('.readout li')].map((e) => e.textContent)"
    )


def test_every_section_is_drawn_without_network_requests(page, runs):
    opened = page(runs[0])
    assert opened.texts("h1") == ["test.example"]
    sections = opened.run("return [...document.querySelectorAll('section')].map((s) => s.id)")
    assert sections == ["curves", "scores", "routers", "profile", "sharding", "setup"]
    assert opened.texts("#curves > .charts .title") == [
        "Loss", "Perplexity", "Accuracy", "Gradient norm", "Learning rate", "Throughput", "Memory",
    ]  # fmt: skip
    assert opened.run("return performance.getEntriesByType('resource').length") == 0
    assert fits(opened)
    # Two spikes, one recompilation, one resumption and one roll back in each of the seven charts.
    count = "return document.querySelectorAll('#curves > .charts .mark.{}').length"
    kinds = ("spike", "compiled", "resumed", "back")
    drawn = {kind: opened.run(count.format(kind)) for kind in kinds}
    assert drawn == {"spike": 14, "compiled": 7, "resumed": 7, "back": 7}
    last = example_runs.metrics(400, 400, 1)
    assert readout(opened, "Loss") == [
        "last: step 400", f"training{last['loss']:.2f}", f"dev{last['dev/loss']:.2f}",
    ]  # fmt: skip


@slow
def test_cursor_reads_all_charts_at_one_step(page, runs):
    opened = page(runs[0])
    opened.type("svg.curve", "\ue011")
    rows = [example_runs.metrics(step, 400, 1) for step in range(1, 401)]
    step, loss = readout(opened, "Loss")[:2]
    assert step == "step 1"
    assert float(loss.removeprefix("training")) == pytest.approx(rows[0]["loss"], rel=0.01)
    assert readout(opened, "Gradient norm")[0] == "step 1"
    opened.type("svg.curve", 76 * "\ue014")
    assert readout(opened, "Loss")[:2] == ["step 77", "training30"]
    assert readout(opened, "Loss")[-1] == "spike at step 77"
    assert readout(opened, "Gradient norm")[:2] == ["step 77", "50"]
    opened.type("svg.curve", "\ue00c")
    assert readout(opened, "Loss")[0] == "last: step 400"


@slow
def test_pointing_at_a_curve_shows_its_value(page, runs):
    opened = page(runs[0])
    opened.hover("svg.curve")
    step = int(readout(opened, "Loss")[0].removeprefix("step "))
    assert 180 < step < 220
    row = example_runs.metrics(step, 400, 1)
    value = float(readout(opened, "Loss")[1].removeprefix("training"))
    assert value == pytest.approx(row["loss"], rel=0.01)


@slow
def test_scale_range_and_smoothing_change_the_curves(page, runs):
    opened = page(runs[0])
    line = f"return {chart('Loss')}.querySelector('.line:not(.faint)').getAttribute('d')"
    shown = [opened.run(line)]
    # The spikes are far above the median, so the scale is logarithmic at first.
    pressed = f"return {chart('Loss')}.querySelector('[aria-pressed=true]').textContent"
    assert opened.run(pressed) == "log"
    opened.click(".chart [data-value=linear]")
    shown.append(opened.run(line))
    opened.click(".tools [data-value=tenth]")
    shown.append(opened.run(line))
    ticks = f"[...{chart('Loss')}.querySelectorAll('.column text')]"
    assert min(opened.run(f"return {ticks}.map((t) => +t.textContent)")) >= 360
    opened.click(".tools [data-value=smooth]")
    shown.append(opened.run(line))
    assert len(set(shown)) == 4
    assert opened.run(f"return {chart('Loss')}.querySelectorAll('.line.faint').length") == 1


@slow
def test_long_runs_are_drawn_with_the_extremes_of_each_interval(page, runs):
    opened = page(runs[1])
    opened.type("svg.curve", "\ue011")
    step, value = readout(opened, "Loss")[:2]
    assert step == "steps 1 to 3"
    low, _, high = value.removeprefix("training").partition(" to ")
    assert float(high) >= float(low[-4:])
    assert opened.run("return document.querySelectorAll('.band').length") > 5


@slow
def test_runs_are_compared(page, runs):
    opened = page(*runs)
    assert opened.texts("#compared tbody th") == ["first", "second"]
    assert opened.texts("#differences tbody td:nth-child(1)") == ["run.steps", "step.seed"]
    assert len(readout(opened, "Loss")) == 5
    assert opened.texts("#curves .tools .legend")[0] == "firstsecond"
    dashes = "e.getAttribute('stroke-dasharray')"
    lines = f"return [...document.querySelectorAll('.chart .line')].map((e) => {dashes})"
    assert len(set(opened.run(lines))) > 1
    assert fits(opened)


@slow
def test_scores_are_shown_by_language(page, runs):
    opened = page(runs[0])
    assert opened.texts("#scores .languages .name") == ["es", "de", "gl"]
    assert opened.texts("#scores .scorebar b") == ["52.5", "41.0", "36.5"]
    opened.click("#scores [data-value=bleu]")
    assert opened.texts("#scores .scorebar b") == ["26.3", "20.5", "18.3"]
    opened.hover("#scores .scorebar")
    assert opened.texts(".tip") == ["es26.3 on 40 rowssources copied: 3.0shuffled: 1.0"]


@slow
def test_load_of_experts_is_drawn_over_steps_and_by_language(page, runs):
    opened = page(runs[0])
    colors = (
        "const map = document.querySelector('#routers canvas'), x = Math.round(0.9 * map.width),"
        "all = map.getContext('2d').getImageData(x, 0, 1, map.height).data,"
        "at = (_, y) => { const i = 4 * Math.floor(y * map.height);"
        "return [...all.slice(i, i + 4)].join(); };"
        "return [at(0.9, 0.1), at(0.9, 0.4), at(0.9, 0.6), at(0.9, 0.9)]"
    )
    assert len(set(opened.run(colors))) == 4
    opened.hover("#routers canvas")
    (told,) = opened.texts("#routers .chart:first-child .told")[:1]
    assert "expert 1 has" in told and "dropped 10 %" in told
    opened.type("#routers canvas", "\ue015")
    below = told[: told.index("expert")] + "expert 2 has"
    assert opened.texts("#routers .chart:first-child .told")[0].startswith(below)
    opened.click("#routers [data-value=by_language]")
    assert opened.texts("#routers .chart:first-child .rownames span")[:2] == ["es", "de"]
    assert opened.texts(".layer-metrics .title") == ["encoder[1]", "decoder[1]"]


@slow
def test_plan_stands_against_profile(page, runs):
    opened = page(runs[0])
    assert opened.texts("#profile .stack + .legend .name") == [
        "products", "attention", "routing and dispatch", "collectives", "optimizer", "input wait",
    ]  # fmt: skip
    assert opened.texts(".kinds small") == [
        "1.6 times the plan", "as planned", "4 times the plan",
    ]  # fmt: skip
    assert opened.texts(".kinds b") == ["50 ms", "80 ms", "30 ms", "30 ms", "10 ms", "40 ms"]
    assert opened.texts("#slowest tbody td:last-child") == ["feed_forward.py:31"]
    assert opened.texts("#profiled-layers tbody td:last-child") == ["1.5", "1.25"]


@slow
def test_tensor_is_drawn_on_the_mesh(page, runs):
    opened = page(runs[0])
    opened.type("#sharding input", "encoder.layers[1] weights")
    opened.click("#tensors tbody tr button")
    assert opened.texts(".mesh .dimensions li") == [
        "E 4 2 parts of 2 over data",
        "M 8 not split",
        "H 16 2 parts of 8 over model",
    ]
    assert opened.texts(".device .id") == ["0", "1", "2", "3"]
    assert opened.texts(".layerbars .name")[2] == "encoder.layers[1]"


@slow
def test_command_environment_and_programs_are_shown(page, runs):
    opened = page(runs[0])
    assert opened.texts(".command") == ["gshard-train --experiment='test.example' --logdir=run"]
    assert opened.texts(".setting") == ["XLA_FLAGS=--xla_a=1"]
    assert opened.texts("#launches-0 tbody td:nth-child(2)") == ["0", "200"]
    assert opened.texts("#programs tbody td:nth-child(2)") == ["1", "50", "120", "201"]


@slow
def test_hostile_text_is_displayed_but_never_executed(page, tmp_path):
    run = example_runs.write_run(tmp_path / "run", 60, experiment=example_runs.HOSTILE)
    opened = page(run)
    assert opened.texts("h1") == [example_runs.HOSTILE]
    assert opened.run("return window.harmed") is None
    assert opened.run("return document.querySelectorAll('img').length") == 0


@slow
def test_a_run_of_an_earlier_version_says_what_is_missing(page, tmp_path):
    run = example_runs.write_run(tmp_path / "run", 60)
    shutil.rmtree(run / "profile")
    for file in run.iterdir():
        if file.name not in ("params.txt", "metrics.jsonl"):
            file.unlink()
    opened = page(run)
    assert "No evaluation is recorded" in opened.texts("#scores p")[0]
    assert "was not recorded" in opened.texts("#sharding p")[0]
    assert "were not recorded" in opened.texts(".setup p")[0]


@slow
@pytest.mark.parametrize("dark", [False, True])
def test_phone(tmp_path, runs, dark):
    with browser.Browser(width=390, height=844, dark=dark, phone=True) as opened:
        opened.open(write(tmp_path / "report.html", runs))
        assert opened.run("return innerWidth") == 390
        assert fits(opened)
        background = opened.run("return getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(18, 21, 24)" if dark else "rgb(251, 251, 249)")
        narrow = (
            "return [...document.querySelectorAll('.curve')].every((c) => "
            "c.getBoundingClientRect().right <= innerWidth)"
        )
        assert opened.run(narrow)
        assert opened.console() == []


@slow
def test_reports_are_readable_on_phones_and_desks_in_light_and_dark(runs, tmp_path):
    for count in (1, 2):
        address = write(tmp_path / f"{count}.html", runs[:count])
        with browser.Browser(1280) as opened:
            opened.open(address)
            # The options of scores are in the last column.
            beyond = "return [...document.querySelectorAll('#scores .scroll')]"
            beyond += ".filter((e) => e.scrollWidth > e.clientWidth).length"
            assert opened.run(beyond) == 0
        assert audit.problems_on_screens(lambda opened, page=address: opened.open(page)) == []
