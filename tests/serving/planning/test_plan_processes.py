# tests: wings/serving/planning/jobs.py, wings/serving/planning/process.py
# tests: wings/serving/planning/requests.py, wings/serving/planning/worker.py
# tests: wings/serving/planning/app.py
"""Tests that no plan harms the server or later plans: processes, limits, sizes and lists."""

import contextlib
import json
import os
import pathlib
import time

import pytest
from starlette.testclient import TestClient

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.wings.serving.origins import Origins
from lingvo_gshard.wings.serving.planning import app
from lingvo_gshard.wings.serving.planning.jobs import PlanJobs
from lingvo_gshard.wings.serving.planning.process import PlanLimits, PlanProcess, resident_bytes
from lingvo_gshard.wings.serving.planning.requests import PlanRequest
from lingvo_gshard.wings.serving.planning.worker import PlanAnswer
from tests.open_models.published import CONFIG
from tests.planning import example_plan

TOO_LARGE = (
    "gpu:h100:1000000000x8",
    "gpu:h100:100000x8",
    "gpu:h100:8x100000000",
    "v5p:8x8x8*1000000",
    "cpu:99999999999999999999",
    f"gpu:h100:{'9' * 5000}x8",
    f"v5p:2x2x{'9' * 150}",
    f"v5p:2x2x2*{'9' * 150}",
)


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    (folder / "llama.json").write_text(json.dumps(CONFIG))
    return app.configs_in(folder)


def client_of(jobs):
    return TestClient(
        app.make_app(jobs, Origins.of("127.0.0.1")),
        base_url="http://localhost",
        raise_server_exceptions=False,
    )


def ended(job):
    while job.state in ("waiting", "running"):
        time.sleep(0.02)
    return job


def told(news):
    """Does nothing with news."""


@pytest.mark.parametrize("topology", TOO_LARGE, ids=lambda name: name[:30])
def test_machines_that_nobody_has_are_refused_at_once(configs, topology):
    jobs = PlanJobs(configs, run=lambda *_: pytest.fail("it was planned"))
    response = client_of(jobs).post("/api/plans", json={"topology": topology, "config": "llama"})
    assert response.status_code == 400 and "topology" in response.json()["error"]["message"]
    jobs.close()


@pytest.mark.parametrize(
    "limits, said",
    [
        (PlanLimits(seconds=0.3), "took longer than 0 s, the limit of this server"),
        (PlanLimits(bytes=2**25), "took more than 0.0 GiB of memory, the limit"),
    ],
    ids=["seconds", "bytes"],
)
def test_a_plan_that_passes_a_limit_ends_with_its_process(configs, limits, said):
    planner, before = PlanProcess(configs, limits=limits), children()
    began = time.monotonic()
    with pytest.raises(UserError, match=said):
        planner(PlanRequest(topology="cpu:2", config="llama"), told, lambda: False)
    assert time.monotonic() - began < 10 and children() <= before


def test_a_plan_that_is_not_wanted_any_more_ends(configs):
    jobs, before = PlanJobs(configs), children()
    job = jobs.submit(PlanRequest(topology="cpu:2", config="llama"))
    while job.state == "waiting":
        time.sleep(0.01)
    time.sleep(0.2)
    jobs.close()
    assert job.problem == "the plan was given up" and children() <= before


def test_a_plan_under_way_is_cancelled_and_one_that_waits_is_not_made(configs):
    asked, given_up = [], []

    def run(request, tell, is_over):
        asked.append(request.topology)
        while not is_over():
            time.sleep(0.01)
        given_up.append(request.topology)
        raise UserError("the plan was given up")

    jobs = PlanJobs(configs, run=run)
    client = client_of(jobs)
    keys = [
        client.post("/api/plans", json={"topology": name, "config": "llama"}).json()["id"]
        for name in ("cpu:2", "cpu:4", "cpu:8")
    ]
    while not asked:
        time.sleep(0.01)
    assert jobs.waiting == 2
    assert client.delete(f"/api/plans/{keys[1]}").status_code == 200
    assert client.delete(f"/api/plans/{keys[1]}").status_code == 404
    assert client.delete(f"/api/plans/{keys[0]}").status_code == 200
    while len(asked) < 2:
        time.sleep(0.01)
    assert asked == ["cpu:2", "cpu:8"] and given_up == ["cpu:2"]
    assert [job["id"] for job in client.get("/api/plans").json()["plans"]] == [keys[2]]
    jobs.close()


def children():
    """Returns the processes that this one has started."""
    found = set()
    for children in pathlib.Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # The thread has ended.
            found.update(children.read_text().split())
    return found


def test_the_memory_of_a_process_is_that_of_its_children_too():
    parts = [resident_bytes(int(pid)) for pid in children()]
    assert resident_bytes(os.getpid()) > sum(parts) > -1
    assert resident_bytes(2**30) == 0


@pytest.mark.slow
def test_a_plan_is_made_after_one_that_breaks_its_process(configs):
    """Devices of the first would stay in a process that made both."""
    jobs = PlanJobs(configs, PlanProcess(configs, limits=PlanLimits(seconds=120, bytes=2**33)))
    fields = {"config": "llama", "batch_rows": 8, "length": 32}
    wrong = [
        PlanRequest(topology="cpu:4", mesh="data=3", **fields),
        PlanRequest(topology="cpu:4", strategy="[" * 900, **fields),
        PlanRequest(topology="cpu:4", content={**CONFIG, "num_hidden_layers": 10**12}),
    ]
    for request in wrong:
        assert ended(jobs.submit(request)).state == "failed"
    job = ended(jobs.submit(PlanRequest(topology="cpu:2", mesh="data=2", **fields)))
    assert (job.state, job.problem) == ("done", "") and job.answer.plans[0].devices == 2
    assert ended(jobs.submit(PlanRequest(topology="cpu:8", mesh="data=8", **fields))).answer
    jobs.close()


def test_a_fault_of_ours_is_told_without_its_traceback_and_logged(configs, caplog):
    def fail(*_):
        raise RuntimeError("secret")

    jobs = PlanJobs(configs, run=fail)
    job = ended(jobs.submit(PlanRequest(topology="cpu:2", config="llama")))
    assert job.problem == "planning failed; the log of the server says why"
    assert [record.exc_info[1].args for record in caplog.records] == [("secret",)]
    jobs.close()


def test_lists_and_jobs_do_not_show_the_content_of_configs(configs):
    waits = [True]

    def run(request, tell, is_over):
        while waits[0] and not is_over():
            time.sleep(0.01)
        return PlanAnswer([example_plan.as_plan(example_plan.example_plan())])

    jobs = PlanJobs(configs, run=run)
    client = client_of(jobs)
    for number in range(21):
        content = {"model_type": "llama", "number": number, "long": "x" * 200_000}
        body = {"topology": "cpu:2", "content": content}
        response = client.post("/api/plans", json=body)
        assert response.status_code == 200 and len(response.content) < 1000
        while number == 0 and not jobs.all()[0].began:
            time.sleep(0.01)
    assert len(client.get("/api/plans").content) < 21 * 1000
    refused = client.post("/api/plans", json={"topology": "cpu:4", "config": "llama"})
    assert "20 plans wait already" in refused.json()["error"]["message"]
    waits[0] = False
    for job in jobs.all():
        assert ended(job).request.content is None
    done = client.post("/api/plans", json=body).json()
    assert done["state"] == "done"
    # A page has each plan once, however often it is asked for.
    pages = [client.get("/saved", params={"plans": ",".join([done["id"]] * n)}) for n in (1, 900)]
    assert pages[0].text == pages[1].text
    jobs.close()


@pytest.mark.parametrize(
    "field",
    ["topology", "title", "mesh", "strategy", "precision", "config", "experiment", "dispatch"],
)
def test_long_texts_are_refused(configs, field):
    jobs = PlanJobs(configs, run=lambda *_: pytest.fail("it was planned"))
    body = {"topology": "cpu:2", "config": "llama", field: "x" * 5000}
    response = client_of(jobs).post("/api/plans", json=body)
    assert response.status_code == 400 and len(response.content) < 500
    assert response.json()["error"]["param"] == field
    jobs.close()


def test_requests_are_counted(configs):
    jobs = PlanJobs(configs, run=lambda *_: pytest.fail("it was planned"))
    client = client_of(jobs)
    client.get("/api/none")
    client.post("/api/plans", content=b"{")
    found = client.get("/metrics").text
    assert 'gshard_errors_total{path="other",status="404"} 1.0' in found
    assert 'gshard_errors_total{path="/api/plans",status="400"} 1.0' in found
    jobs.close()


MIXTURE = {**CONFIG, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
MIXTURE |= {"num_local_experts": 4, "num_experts_per_tok": 2}


def test_choices_of_the_page_are_params_of_the_model(configs):
    asked = PlanRequest(
        topology="cpu:2",
        content=MIXTURE,
        batch_rows=8,
        micro_batches=2,
        rematerialize="full",
        dispatch="gather",
        precision="float32",
    )
    asked.check(configs)
    found = asked.params(configs)
    assert (found.input.batch_rows, found.step.micro_batches) == (8, 2)
    assert found.step.precision == "float32"
    assert found.task.decoder.execution.rematerialize == "full"
    assert found.task.decoder.moe.dispatch.cls.__name__ == "GatherDispatch"
    assert found.task.decoder.moe.router.capacity_factor == 1.25
    own = PlanRequest(topology="cpu:2", content=MIXTURE).params(configs)
    assert own.task.decoder.moe.dispatch.cls.__name__ == "DroplessDispatch"
    assert own.step.precision == "bfloat16" and own.step.micro_batches == 1


@pytest.mark.slow
def test_generation_is_planned_with_its_cost(configs):
    jobs = PlanJobs(configs, PlanProcess(configs, limits=PlanLimits(seconds=300)))
    fields = {"config": "llama", "length": 32, "tokens": 3.6e6, "price": 2.0}
    job = ended(jobs.submit(PlanRequest(topology="cpu:2", mode="generate", **fields)))
    assert job.problem == ""
    decoding, prefill = job.answer.plans
    assert (decoding.change, prefill.change) == ("decoding", "prefill")
    budget = decoding.budget
    hours = 2 * 1000 * decoding.seconds_per_step / decoding.tokens_per_step
    assert budget.tokens == 3.6e6 and budget.chip_hours == pytest.approx(hours)
    assert budget.price == pytest.approx(2.0 * hours) and budget.currency == "USD"
    jobs.close()


@pytest.mark.slow
def test_warnings_of_a_plan_come_with_it(configs):
    jobs = PlanJobs(configs, PlanProcess(configs, limits=PlanLimits(seconds=300)))
    fields = {"content": MIXTURE, "length": 32, "batch_rows": 2, "strategy": "expert_fsdp"}
    job = ended(jobs.submit(PlanRequest(topology="cpu:4", **fields)))
    assert job.problem == ""
    assert any("do not divide evenly" in text for text in job.answer.warnings)
    jobs.close()
