# tests: wings/serving/admission_queue.py, wings/serving/app.py, wings/serving/service.py
# tests: wings/serving/errors.py, wings/serving/bodies.py, wings/serving/limits.py
"""Tests what happens at the limits: full queue, deadlines, clients that leave, tokens, sizes."""

import asyncio
import json
import shutil
import threading

import httpx
import pytest
from starlette.testclient import TestClient

from lingvo_gshard.training.run.logdir import Logdir
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.requests import Answer, Finished, Hypothesis
from lingvo_gshard.wings.serving.app import make_app
from lingvo_gshard.wings.serving.errors import RequestError
from lingvo_gshard.wings.serving.limits import Limits
from lingvo_gshard.wings.serving.model import DirectoryWatch, ServedModel
from lingvo_gshard.wings.serving.service import Service
from tests.data import corpora
from tests.serving.conftest import PATIENT

pytestmark = pytest.mark.xdist_group("serving")

BODY = {"text": "a b", "beam_size": 1, "most_tokens": 8}


class SlowEngine:
    """An engine that answers when it is told to, or when a request is canceled."""

    def __init__(self, real):
        self.executables = self  # It has no programs to ask.
        self.facts, self.waiting = real.facts, 0
        self.answers: list[Answer] = []
        self.submitted = threading.Event()

    def knows(self, kind):
        return True

    def stuck(self, seconds):
        return []

    def stuck_programs(self, seconds):
        return []

    def submit_all(self, requests):
        new = [Answer(request) for request in requests]
        self.answers += new
        self.submitted.set()
        return new

    def finish(self):
        for answer in self.answers:
            answer.put(Finished((Hypothesis((), (0.0,), 0.0),)))


@pytest.fixture
def slow(translating):
    """Returns an engine that answers when told to, and a function that serves with it."""
    engine = SlowEngine(translating.engine)
    model = ServedModel(
        "slow",
        1,
        engine,
        translating.vocabulary,
        translating.translator,
        translating.source_vocabulary,
    )
    return engine, lambda **limits: Service(model, Limits(**limits))


async def submitted(engine, first):
    """Waits until the engine has a request of a task, which must not end without one."""
    while not engine.answers:
        assert not first.done(), first.result()[0].text
        await asyncio.sleep(0.001)


async def posted(app, *bodies):
    """Returns the answers to bodies that are sent at once."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        return await asyncio.gather(*(client.post("/v1/translate", json=b) for b in bodies))


def test_concurrent_requests_get_the_answers_of_the_offline_translator(translating):
    sources = [row.source for row in corpora.rows(24)]
    options = DecodingOptions(beam_size=1, most_tokens=8)
    expected = translating.translator.translate(sources, options=options).texts
    app = make_app(Service(translating, PATIENT))
    responses = asyncio.run(posted(app, *(BODY | {"text": text} for text in sources)))
    assert [r.status_code for r in responses] == [200] * len(sources)
    assert [r.json()["translations"][0]["text"] for r in responses] == expected


def test_a_full_queue_is_503_and_takes_requests_again_when_it_is_empty(slow):
    engine, serve = slow
    service = serve(queue_size=2)

    async def run():
        app = make_app(service)
        first = asyncio.create_task(posted(app, BODY | {"text": ["a", "b"]}))
        await submitted(engine, first)
        (full,) = await posted(app, BODY)
        assert full.status_code == 503 and full.headers["retry-after"] == "1"
        assert "the queue is full: 2 texts are under way" in full.text
        (never,) = await posted(app, BODY | {"text": ["a", "b", "c"]})
        assert never.status_code == 413 and "this server takes 2" in never.text
        engine.finish()
        assert (await first)[0].status_code == 200
        assert service.queue.under_way == 0

    asyncio.run(run())


def test_a_deadline_is_504_and_cancels_the_request(slow):
    engine, serve = slow
    service = serve(timeout=30.0)

    async def run():
        (late,) = await posted(make_app(service), BODY | {"timeout": 0.05})
        assert late.status_code == 504 and "the time for this request is over" in late.text
        # The text holds its place until the engine has let it go.
        assert engine.answers[0].is_canceled and service.queue.under_way == 1
        engine.finish()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert service.queue.under_way == 0

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(slow, writing, stream):
    engine, serve = slow
    service = serve()
    if stream:
        model = ServedModel("slow", 1, engine, writing.vocabulary)
        engine.facts, service = writing.engine.facts, Service(model)
    path = "/v1/generate" if stream else "/v1/translate"
    body = {"prompt": "a", "stream": True} if stream else BODY

    async def run():
        sent = []
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive():
            if messages:
                return messages.pop()
            while not engine.answers:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"spec_version": "2.3"},
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [],
        }
        await asyncio.wait_for(make_app(service)(scope, receive, send), 30)
        assert engine.answers[0].is_canceled

    asyncio.run(run())
    text = service.metrics.text()[0].decode()
    assert "gshard_requests_under_way 0.0" in text


def test_an_engine_that_fails_is_500_and_the_next_request_is_answered(slow):
    engine, serve = slow
    service = serve()

    async def run():
        app = make_app(service)
        first = asyncio.create_task(posted(app, BODY))
        await submitted(engine, first)
        engine.answers[0].put(MemoryError("no memory"))
        (failed,) = await first
        assert failed.status_code == 500 and "its log says why" in failed.text
        assert service.queue.under_way == 0

    asyncio.run(run())


def test_bodies_beyond_the_limit_are_413_also_without_a_length(translating):
    client = TestClient(make_app(Service(translating, Limits(most_body_bytes=100))))
    for content in (b"x" * 101, iter([b"x" * 60, b"x" * 60])):
        response = client.post("/v1/translate", content=content)
        assert response.status_code == 413 and "more than 100 bytes" in response.text


@pytest.mark.parametrize(
    "stop, said",
    [
        (["x"] * 17, "stop has 17 texts; at most 16 were expected"),
        ("x" * 257, "stop has a text of 257 characters; at most 256 were expected"),
    ],
)
def test_texts_that_end_a_text_are_few_and_short(writer_client, client, stop, said):
    for one, path, field in (
        (writer_client, "/v1/generate", "prompt"),
        (client, "/v1/translate", "text"),
    ):
        body = {field: "a b", "stop": stop, "beam_size": 1}
        response = one.post(path, json=body)
        assert response.status_code == 422
        assert response.json()["error"]["message"] == said


@pytest.mark.parametrize("path", ["/v1/translate", "/v1/generate", "/v1/completions"])
def test_large_texts_are_tokenized_beside_the_event_loop(path, translating, writing, monkeypatch):
    model = translating if path == "/v1/translate" else writing
    threads = []

    def encode(*_):
        threads.append(threading.current_thread())
        raise RequestError(422, "seen")

    monkeypatch.setattr(type(model.vocabulary), "encode", encode)
    monkeypatch.setattr(type(model.vocabulary), "encode_batch", encode)
    field = "text" if path == "/v1/translate" else "prompt"

    async def run():
        transport = httpx.ASGITransport(make_app(Service(model)))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            response = await client.post(path, json={field: "a " * 2**15})
            assert response.json()["error"]["message"] == "seen"

    asyncio.run(run())
    assert threads and threading.current_thread() not in threads


def test_a_bearer_token_guards_the_interface_but_not_page_and_health(translating):
    client = TestClient(make_app(Service(translating, token="secret")))
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
        response = client.get("/v1/models", headers=header)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
    assert client.post("/v1/translate", json=BODY).status_code == 401
    assert client.get("/metrics").status_code == 401
    assert client.get("/healthz").status_code == client.get("/").status_code == 200
    right = {"Authorization": "bearer secret"}
    assert client.get("/v1/models", headers=right).status_code == 200


def test_metrics_count_requests_errors_tokens_and_seconds(translating):
    client = TestClient(make_app(Service(translating, PATIENT)))
    client.post("/v1/translate", json=BODY)
    client.post("/v1/translate", json={})
    client.get("/secret/path")
    text = client.get("/metrics").text
    for line in (
        'gshard_requests_total{path="/v1/translate",status="200"} 1.0',
        'gshard_requests_total{path="/v1/translate",status="422"} 1.0',
        'gshard_errors_total{path="/v1/translate",status="422"} 1.0',
        'gshard_errors_total{path="other",status="404"} 1.0',
        'gshard_request_seconds_count{path="/v1/translate"} 2.0',
        "gshard_queue_length 0.0",
    ):
        assert line in text.splitlines(), text
    (tokens,) = [x for x in text.splitlines() if x.startswith("gshard_tokens_total ")]
    assert 0 < float(tokens.split()[1]) <= 8


def test_health_says_what_became_of_the_directory(translating, trained_logdir, tmp_path, caplog):
    path = tmp_path / "run"
    shutil.copytree(trained_logdir, path)
    watch = DirectoryWatch(Logdir(path), translating.step)
    service = Service(translating, PATIENT, directory=watch)
    client = TestClient(make_app(service))
    assert client.get("/healthz").json()["directory"] == "unchanged"
    path.rename(tmp_path / "gone")
    assert client.get("/healthz").json()["directory"] == "removed"
    shutil.copytree(tmp_path / "gone", path)
    assert client.get("/healthz").json()["directory"] == "replaced"
    assert "The server goes on with the model of step 20" in caplog.text
    assert client.post("/v1/translate", json=BODY).status_code == 200
    service.is_draining = True
    response = client.get("/healthz")
    assert (response.status_code, response.json()["status"]) == (503, "draining")
