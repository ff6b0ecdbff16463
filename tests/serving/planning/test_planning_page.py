# tests: wings/serving/planning/page/, wings/serving/planning/app.py
# tests: wings/serving/planning/worker.py
"""Uses the planning page in a real browser, from an empty form to a comparison of two machines."""

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
from lingvo_gshard.wings.serving.origins import Origins
from lingvo_gshard.wings.serving.planning import app
from lingvo_gshard.wings.serving.planning.jobs import PlanJobs
from lingvo_gshard.wings.serving.planning.requests import PlanRequest
from lingvo_gshard.wings.serving.planning.worker import News
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
    found = example_plan.as_plan(example_plan.example_plan())
    factor = 2.0 if request.topology == "v4:4x4x4" else 1.0
    return msgspec.structs.replace(
        found,
        name=request.model,
        topology=request.topology,
        seconds_per_step=found.seconds_per_step * factor,
    )


@pytest.fixture
def jobs(tmp_path):
    (tmp_path / "llama.json").write_text(json.dumps(CONFIG))
    made = PlanJobs(app.configs_in(tmp_path), run=plan_of)
    yield made
    made.close()


@pytest.fixture
def address(jobs):
    """Returns the address of a server on a thread."""
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


def until(opened, condition, *arguments):
    limit = time.monotonic() + 30
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
    width = {"width": 390, "height": 800, "phone": True} if phone else {}
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
        ask(opened, "cpu:2")
        assert "needs 3 devices" in opened.texts(".state.bad")[0]
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


def test_the_command_serves_the_page_until_a_signal(tmp_path):
    port_file = tmp_path / "port"
    command = [sys.executable, "-m", "lingvo_gshard", "plan", "--serve", "--port=0"]
    process = subprocess.Popen([*command, f"--port_file={port_file}"], stderr=subprocess.PIPE)
    try:
        while not port_file.exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        url = f"http://127.0.0.1:{port_file.read_text().strip()}/api/choices"
        found = json.load(urllib.request.urlopen(url))
        assert "v3:32x32" in [each["topology"] for each in found["topologies"]]
        assert "language_model.quickstart" in [each["name"] for each in found["experiments"]]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


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
