# tests: wings/serving/planning/page/, wings/serving/planning/app.py
# tests: wings/serving/planning/worker.py
"""Uses the planning page in a real browser, from an empty form to a comparison of two machines."""

import contextlib
import json
import pathlib
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import msgspec
import pytest
import uvicorn
from starlette.testclient import TestClient

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools import plan
from lingvo_gshard.tools.console import startup
from lingvo_gshard.wings.planning.plan.plan import Remedy
from lingvo_gshard.wings.serving.origins import Origins
from lingvo_gshard.wings.serving.planning import app
from lingvo_gshard.wings.serving.planning.jobs import PlanJobs
from lingvo_gshard.wings.serving.planning.requests import PlanRequest
from lingvo_gshard.wings.serving.planning.worker import News, PlanAnswer
from lingvo_gshard.wings.serving.server import bind
from tests.open_models.published import CONFIG
from tests.pages import audit, browser
from tests.planning import example_plan

needs_browser = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())


def plan_of(request, tell, is_over):
    """Returns an example plan that depends on the request, in place of a compilation."""
    if request.topology == "cpu:2":
        raise UserError("`mesh=data=3` needs 3 devices")
    tell(News(stage="Compiling"))
    while request.topology == "cpu:3" and not is_over():
        time.sleep(0.01)
    found = example_plan.as_plan(example_plan.example_plan())
    factor = 2.0 if request.topology == "v4:4x4x4" else 1.0
    plan = msgspec.structs.replace(
        found,
        name=request.model,
        topology=request.topology,
        seconds_per_step=found.seconds_per_step * factor,
        remedies=[],
    )
    return PlanAnswer([plan], warnings=["layer: 8 token groups, set `input.batch_rows = 64`"])


@pytest.fixture
def jobs(tmp_path):
    (tmp_path / "llama.json").write_text(json.dumps(CONFIG))
    made = PlanJobs(app.configs_in(tmp_path), run=plan_of)
    yield made
    made.close()


@pytest.fixture
def address(jobs):
    """Returns the address of a server on a thread."""
    with serving(jobs) as found:
        yield found


@contextlib.contextmanager
def serving(jobs):
    """Serves the page on a thread, and gives its address."""
    bound = bind("127.0.0.1", 0)
    made = app.make_app(jobs, Origins.of("127.0.0.1"))
    server = uvicorn.Server(uvicorn.Config(made, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{bound.getsockname()[1]}/"
    server.should_exit = True
    thread.join()


def until(opened, condition, *arguments, seconds=30):
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if opened.run(f"return {condition}", *arguments):
            return
        time.sleep(0.05)
    raise AssertionError(opened.run("return document.body.innerText"))


def ask(opened, topology):
    opened.run("document.querySelector('#topology').value = ''")
    opened.type("#topology", topology)
    opened.click("#go")
    ended = "e.textContent.includes(arguments[0]) && /done|failed/.test(e.dataset.state)"
    until(opened, f"[...document.querySelectorAll('#jobs li')].some((e) => {ended})", topology)


@needs_browser
@pytest.mark.parametrize("phone", [False, True])
def test_from_an_empty_form_to_a_comparison_of_two_machines(address, tmp_path, phone):
    width = {"width": 360, "height": 800, "phone": True} if phone else {}
    with browser.Browser(**width) as opened:
        opened.open(address)
        until(opened, "document.querySelectorAll('#model option').length > 2")
        opened.click("#go")
        assert not opened.texts("#jobs li")
        opened.run("document.querySelector('#model').value = 'config:llama'")
        ask(opened, "v5p:4x4x4")
        ask(opened, "v4:4x4x4")
        heads = opened.texts(".compared thead th")
        assert heads == ["", "llama on v5p:4x4x4", "llama on v4:4x4x4"]
        differing = opened.texts(".compared tr.differs > th")
        assert differing == ["machine", "step (estimate)"]
        assert "+100 %" in opened.texts(".compared tr.differs td:last-child")[1]
        # Two plans stand beside each other, also on a phone.
        edges = "return [...document.querySelectorAll('.compared thead th')].slice(1)"
        edges += ".map((e) => [e.getBoundingClientRect().left, e.getBoundingClientRect().right])"
        (first, second) = opened.run(edges)
        assert 0 <= first[0] < first[1] <= second[0] < second[1] <= (360 if phone else 1280)
        ask(opened, "cpu:2")
        assert opened.texts("#jobs p.bad")[0] == "mesh=data=3 needs 3 devices"
        saved = opened.run("return document.querySelector('#save').href")
        # The page itself never scrolls sideways; the table does.
        sizes = (
            "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        scrolled, shown = opened.run(sizes)
        assert scrolled <= shown
        assert [line for line in opened.console() if "SEVERE" in line] == []
        page = tmp_path / "comparison.html"
        page.write_bytes(urllib.request.urlopen(saved).read())
        opened.open(page.as_uri())
        assert opened.texts(".compared thead th") == heads
        assert [line for line in opened.console() if "SEVERE" in line] == []


@needs_browser
def test_a_config_may_be_dropped(address):
    with browser.Browser() as opened:
        opened.open(address)
        until(opened, "document.querySelectorAll('#model option').length > 2")
        drop = """
            const transfer = new DataTransfer();
            transfer.items.add(new File([arguments[0]], arguments[1]));
            document.querySelector('#drop').dispatchEvent(
                new DragEvent('drop', { dataTransfer: transfer, bubbles: true, cancelable: true }));
        """
        opened.run(drop, "no json", "other.json")
        until(opened, "document.querySelector('#problem').textContent.includes('no JSON object')")
        opened.run(drop, json.dumps(CONFIG), "config.json")
        until(opened, "document.querySelector('#chosen').textContent.includes('llama')")
        ask(opened, "v5p:4x4x4")
        assert opened.texts(".compared thead th")[1] == "llama on v5p:4x4x4"


def test_a_request_that_was_answered_is_answered_at_once(jobs):
    asked = PlanRequest(topology="v5p:4x4x4", config="llama")
    job = jobs.submit(asked)
    while job.state in ("waiting", "running"):
        time.sleep(0.01)
    assert (
        job.state == "done"
        and jobs.submit(PlanRequest(topology="v5p:4x4x4", config="llama")) is job
    )
    failed = jobs.submit(PlanRequest(topology="cpu:2", config="llama"))
    while failed.state != "failed":
        time.sleep(0.01)
    assert jobs.submit(failed.request) is not failed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "0 models are given"),
        ({"config": "llama", "experiment": "translation.quickstart"}, "2 models are given"),
        ({"config": "lama"}, "config is 'lama'. Did you mean 'llama'?"),
        ({"experiment": "os.path"}, "experiment is 'os.path'."),
        ({"config": "llama", "precision": "float3"}, "precision is 'float3'."),
        ({"config": "llama", "rematerialize": "ful"}, "Did you mean 'full'"),
        ({"config": "llama", "dispatch": "gathe"}, "Did you mean 'gather'"),
        ({"config": "llama", "tokens": -1}, "tokens"),
        ({"config": "llama", "price": 1e30}, "price"),
        ({"config": "llama", "topology": "v5p:4x4"}, "v5p:4x4"),
        ({"config": "llama", "mode": "guess"}, "mode is"),
    ],
)
def test_wrong_requests_are_refused(jobs, fields, message):
    client = TestClient(app.make_app(jobs, Origins.of("127.0.0.1")), base_url="http://localhost")
    response = client.post("/api/plans", json={"topology": "v5p:4x4x4", **fields})
    assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_only_its_own_pages_may_use_the_server(address):
    def status(**headers):
        request = urllib.request.Request(f"{address}api/plans", headers=headers)
        try:
            return urllib.request.urlopen(request).status
        except urllib.error.HTTPError as error:
            return error.code

    assert status() == 200
    assert status(Origin=address.rstrip("/")) == 200
    assert status(Origin="https://evil.example") == 403
    assert status(Host="evil.example") == 421
    assert urllib.request.urlopen(address).headers["Content-Security-Policy"].startswith("default")


def test_configs_of_the_source_tree_are_offered():
    found = app.configs_in(app.configs_of_the_source_tree())
    assert "llama-3.1-8b" in found and all(isinstance(p, pathlib.Path) for p in found.values())


@contextlib.contextmanager
def served_by_the_command(folder, *flags):
    """Runs gshard-plan --serve, and gives the address of its page."""
    port_file = folder / "port"
    command = [sys.executable, "-m", "lingvo_gshard", "plan", "--serve", "--port=0"]
    process = subprocess.Popen(
        [*command, f"--port_file={port_file}", *flags], stderr=subprocess.PIPE
    )
    try:
        while not port_file.exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text().strip()}/"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def test_the_command_serves_the_page_until_a_signal(tmp_path):
    with served_by_the_command(tmp_path) as address:
        found = json.load(urllib.request.urlopen(f"{address}api/choices"))
        assert "v3:32x32" in [each["topology"] for each in found["topologies"]]
        assert "language_model.quickstart" in [each["name"] for each in found["experiments"]]
        assert {"full", "none"} < set(found["policies"]) and "gather" in found["dispatches"]


def test_flags_that_have_no_effect_on_the_page_are_refused(capsys):
    run = startup.guarded(plan.NAME, plan.main)
    assert run([plan.NAME, "--serve", "--topology=cpu:2"]) != 0
    assert "--topology=cpu:2 has no effect on --serve" in capsys.readouterr().err
    assert run([plan.NAME, "--serve", "--configs=none"]) != 0
    assert "--configs=none: there is no such directory" in capsys.readouterr().err


@needs_browser
@pytest.mark.slow
def test_the_page_is_readable_on_phones_and_desks_in_light_and_dark(address):
    def compare(opened):
        opened.open(address)
        until(opened, "document.querySelectorAll('#model option').length > 2")
        opened.run("document.querySelector('#model').value = 'config:llama'")
        for topology in ("v5p:4x4x4", "v4:4x4x4", "cpu:2"):
            ask(opened, topology)

    assert audit.problems_on_screens(compare) == []


QWEN = "qwen3-30b-a3b"
FITS = "`step.micro_batches = 8`"


def qwen_of(seen):
    """Returns a stand-in for the planner, which takes a minute, and notes requests in a list."""

    def plan_of(request, tell, is_over):
        seen.append(request)
        found = msgspec.structs.replace(
            example_plan.as_plan(example_plan.example_plan()), topology=request.topology
        )
        if request.rematerialize or request.micro_batches:
            return PlanAnswer([msgspec.structs.replace(found, fits=True, remedies=[])])
        tried = [
            Remedy(change="`step.micro_batches = 4`", fits=False, peak=99 * 2**30,
                   seconds_per_step=5.1),
            Remedy(change=FITS, fits=True, peak=50 * 2**30, seconds_per_step=5.2),
        ]  # fmt: skip
        fitting = msgspec.structs.replace(found, fits=True, change=FITS, remedies=tried)
        return PlanAnswer([fitting], problem="`topology=v5p:4x4x4`: needs far more memory")

    return plan_of


@needs_browser
@pytest.mark.parametrize("phone", [False, True])
def test_a_model_that_does_not_fit_is_answered_with_a_plan_that_does(tmp_path, phone):
    seen = []
    jobs = PlanJobs(app.configs_in(app.configs_of_the_source_tree()), run=qwen_of(seen))
    width = {"width": 360, "height": 800, "phone": True} if phone else {}
    with serving(jobs) as address, browser.Browser(**width) as opened:
        opened.open(address)
        until(opened, "document.querySelectorAll('#model option').length > 2")
        opened.run("document.querySelector('#model').value = arguments[0]", f"config:{QWEN}")
        for field, text in (("mesh", "data=64"), ("batch", "512"), ("length", "4096")):
            opened.type(f"#{field}", text)
        opened.type("#strategy", "expert_fsdp")
        opened.type("#tokens", "1e12")
        opened.type("#price", "2.5")
        ask(opened, "v5p-128")
        said = opened.texts("#jobs .remarks")[0]
        assert "As asked there is no plan: topology=v5p:4x4x4: needs far more memory" in said
        assert "With step.micro_batches = 8 it fits in" in said
        assert "Tried, and does not fit: 1" in said
        heads = opened.texts(".compared thead th")
        assert heads[1:] == [f"{QWEN} on v5p-128step.micro_batches = 8"]
        asked = seen[0]
        assert (asked.batch_rows, asked.tokens, asked.price) == (512, 1e12, 2.5)
        assert (asked.mesh, asked.strategy, asked.mode) == ("data=64", "expert_fsdp", "plan")
        # With a choice of the reader's own, beside the first.
        opened.run("document.querySelector('#rematerialize').value = 'full'")
        opened.click("#go")
        until(opened, "document.querySelectorAll('.compared thead th').length === 3")
        assert seen[1].rematerialize == "full"
        assert [line for line in opened.console() if "SEVERE" in line] == []
    jobs.close()


@needs_browser
def test_plans_are_cancelled_and_removed(address, jobs):
    with browser.Browser() as opened:
        opened.open(address)
        until(opened, "document.querySelectorAll('#model option').length > 2")
        opened.run("document.querySelector('#model').value = 'config:llama'")
        ask(opened, "v5p:4x4x4")
        assert opened.texts("#jobs p.bad") == [
            "Warning: layer: 8 token groups, set input.batch_rows = 64"
        ]
        opened.run("document.querySelector('#topology').value = 'cpu:3'")
        opened.click("#go")
        until(opened, "[...document.querySelectorAll('#jobs li')].length === 2")
        assert opened.texts("#jobs .remove") == ["Cancel", "Remove"]
        opened.click("#jobs li:first-child .remove")
        until(opened, "[...document.querySelectorAll('#jobs li')].length === 1")
        opened.click("#jobs .remove")
        until(opened, "document.querySelector('#comparison').hidden")
        assert opened.run("return document.querySelector('#plans').hidden")
        limit = time.monotonic() + 10
        while jobs.all() and time.monotonic() < limit:
            time.sleep(0.02)
        assert jobs.all() == []
        assert opened.texts("#problem") == [""]


@needs_browser
def test_fields_that_a_mode_does_not_use_are_off(address):
    off = ".fields input:disabled, .fields select:disabled"
    used = f"return [...document.querySelectorAll('{off}')].map((e) => e.id)"
    with browser.Browser() as opened:
        opened.open(address)
        until(opened, "document.querySelectorAll('#model option').length > 2")
        found = {}
        for mode in ("plan", "search", "generate"):
            change = "const e = document.querySelector('#mode'); e.value = arguments[0];"
            opened.run(f"{change} e.dispatchEvent(new Event('change'))", mode)
            found[mode] = opened.run(used), opened.texts("#batch-title")
        assert found == {
            "plan": ([], ["Rows of a batch"]),
            "search": (["mesh", "strategy", "rematerialize", "micro-batches"], ["Rows of a batch"]),
            "generate": (["rematerialize", "micro-batches"], ["Texts decoded together"]),
        }


@needs_browser
@pytest.mark.slow
def test_the_command_gets_a_reader_to_a_compiled_plan_that_fits(tmp_path):
    """Two layers of Qwen3 with 16 experts: 64 rows need more than eight v5e have."""
    path = app.configs_of_the_source_tree() / f"{QWEN}.json"
    config = json.loads(path.read_text()) | {"num_hidden_layers": 2, "num_experts": 16}
    (tmp_path / "qwen.json").write_text(json.dumps(config))
    flags = f"--configs={tmp_path}", f"--compilation_cache={tmp_path / 'cache'}"
    with served_by_the_command(tmp_path, *flags) as address, browser.Browser() as opened:
        opened.open(address)
        until(opened, "document.querySelectorAll('#model option').length > 2")
        opened.run("document.querySelector('#model').value = 'config:qwen'")
        texts = {"mesh": "data=8", "strategy": "expert", "batch": "64", "length": "2048"}
        for field, text in {**texts, "topology": "v5litepod-8"}.items():
            opened.type(f"#{field}", text)
        opened.click("#go")
        ended = "document.querySelector('#jobs li[data-state=done], #jobs li[data-state=failed]')"
        until(opened, ended, seconds=900)
        assert opened.texts("#jobs .fitting"), opened.texts("#jobs li")
        fits = opened.run(
            "return [...document.querySelectorAll('.compared tbody tr')]"
            ".find((e) => e.cells[0].textContent === 'fits').innerText.trim().split(/\\s+/)"
        )
        assert "yes" in fits[1:]
        assert all("it fits in" in text for text in opened.texts("#jobs .fitting"))
        assert "v5e:2x4" in opened.texts(".compared thead th")[1]
