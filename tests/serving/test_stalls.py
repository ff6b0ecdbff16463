# tests: wings/serving/service.py, wings/serving/endpoints/state.py, wings/serving/metrics.py
"""Tests that the server answers, and tells how it is, while a part of it does not move."""

import asyncio

import httpx
import pytest
from starlette.testclient import TestClient

from lingvo_gshard.wings.inference.programs.executables import CompilerStuckError
from lingvo_gshard.wings.inference.requests import Answer
from lingvo_gshard.wings.serving.app import make_app
from lingvo_gshard.wings.serving.limits import Limits
from lingvo_gshard.wings.serving.model import ServedModel
from lingvo_gshard.wings.serving.service import Service
from tests.inference.gate import gate
from tests.serving.conftest import PATIENT

pytestmark = pytest.mark.xdist_group("serving")

BODY = {"text": "a b", "beam_size": 1, "most_tokens": 8}


class Engine:
    """An engine that never answers, and remembers what it was asked."""

    def __init__(self, real):
        self.executables = self  # It has no programs to ask.
        self.facts, self.waiting = real.facts, 0
        self.asked, self.forgotten, self.said = [], [], []
        self.answers, self.known, self.compiled = [], set(), []

    def submit_all(self, requests):
        self.asked += requests
        self.answers = [Answer(request) for request in requests]
        return self.answers

    def knows(self, kind):
        return kind.beam in self.known

    def forget(self, kind):
        self.forgotten.append(kind)

    def stuck(self, seconds):
        return self.said

    def stuck_programs(self, seconds):
        return self.compiled


@pytest.fixture
def engine(translating):
    return Engine(translating.engine)


@pytest.fixture
def serving(translating, engine):
    """Returns a function that serves with the engine that never answers."""
    model = ServedModel(
        "slow",
        1,
        engine,
        translating.vocabulary,
        translating.translator,
        translating.source_vocabulary,
    )
    return lambda **limits: Service(model, Limits(**limits))


def client_of(app):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://here")


def test_a_rare_beam_that_is_compiled_delays_nobody(translating):
    """The rare request is given up with 504, and does not keep a worker from the others."""
    service = Service(translating, Limits(timeout=600.0))
    executables = translating.engine.executables

    async def run():
        async with client_of(make_app(service)) as client:
            # Programs of the common kind are there.
            assert (await client.post("/v1/translate", json=BODY)).status_code == 200
            with gate(executables, lambda key: key.kind is not None and key.kind.beam == 5):
                rare = BODY | {"beam_size": 5, "timeout": 3.0}
                late = [asyncio.create_task(client.post("/v1/translate", json=rare))] * 4
                while not any(key.kind and key.kind.beam == 5 for key in executables.making()):
                    await asyncio.sleep(0.01)
                for _ in range(5):
                    response = await client.post("/v1/translate", json=BODY)
                    assert response.status_code == 200
                assert not any(task.done() for task in late)
                assert {(await task).status_code for task in late} == {504}
                # The texts that waited for the program have left.
                assert service.queue.under_way == 0 and translating.engine.waiting == 0

    asyncio.run(run())


def test_routing_waits_for_its_program_and_holds_up_nobody(translating):
    service = Service(translating, PATIENT)

    async def run():
        async with client_of(make_app(service)) as client:
            held = gate(translating.engine.executables, lambda key: key.name == "gates")
            with held as programs:
                body = BODY | {"routing": True}
                first = asyncio.create_task(client.post("/v1/translate", json=body))
                while not programs.asked.is_set():
                    await asyncio.sleep(0.01)
                short = body | {"timeout": 0.2}
                assert (await client.post("/v1/translate", json=short)).status_code == 504
                assert (await client.post("/v1/translate", json=BODY)).status_code == 200
                programs.open()
                (found,) = (await first).json()["translations"]
                assert found["alternatives"][0]["routing"]["layers"]

    asyncio.run(run())


def test_a_compiler_that_hangs_is_told_to_those_who_need_it(serving, engine):
    async def run():
        async with client_of(make_app(serving())) as client:
            task = asyncio.create_task(client.post("/v1/translate", json=BODY))
            while not engine.answers:
                assert not task.done(), task.result().text
                await asyncio.sleep(0.001)
            engine.answers[0].put(CompilerStuckError("compiling steps took longer than 600 s"))
            response = await task
            assert response.status_code == 503
            error = response.json()["error"]
            assert error["code"] == "compiler_stuck"
            assert error["message"] == "compiling steps took longer than 600 s; try later"

    asyncio.run(run())


def test_kinds_of_search_are_limited_and_old_ones_are_forgotten(serving, engine):
    service = serving(most_kinds=2)

    async def run():
        async with client_of(make_app(service)) as client:

            def post(beam):
                body = {"text": "a", "beam_size": beam, "timeout": 30.0}
                return asyncio.create_task(client.post("/v1/translate", json=body))

            async def asked(count):
                while len(engine.asked) < count:
                    await asyncio.sleep(0.001)

            first = post(1)
            await asked(1)
            answers = engine.answers
            second = post(2)
            await asked(2)
            full = await post(3)
            assert full.status_code == 503 and full.headers["retry-after"] == "1"
            assert full.json()["error"]["code"] == "too_many_kinds"
            assert engine.forgotten == []
            # What is compiled already is not kept out by what is not.
            engine.known = {4}
            known = post(4)
            await asked(3)
            engine.known = set()
            engine.answers[0].complete(0, ())
            await known
            # The first is over, and its kind gives way.
            answers[0].complete(0, ())
            await first
            third = post(3)
            await asked(4)
            assert sorted(kind.beam for kind in engine.forgotten) == [1, 4]
            # Kinds in use are taken as ever.
            fourth = post(2)
            await asked(5)
            for task in (second, third, fourth):
                task.cancel()

    asyncio.run(run())


def test_clients_and_their_requests_are_told_apart(serving, engine):
    app = make_app(serving(timeout=0.2))
    for host in ("192.0.2.1", "192.0.2.2", "192.0.2.1"):
        client = TestClient(app, client=(host, 1))
        client.post("/v1/translate", json=BODY | {"text": ["a", "b"]})
    clients = [request.client for request in engine.asked]
    groups = [request.group for request in engine.asked]
    assert clients == ["192.0.2.1"] * 2 + ["192.0.2.2"] * 2 + ["192.0.2.1"] * 2
    assert groups[::2] == groups[1::2] and len(set(groups)) == 3


def test_health_tells_live_from_ready(serving, engine):
    service = serving()
    client = TestClient(make_app(service))

    def state():
        ready, live = client.get("/healthz"), client.get("/healthz/live")
        assert ready.json()["live"] == live.json()["live"]
        assert ready.json()["ready"] == (ready.status_code == 200)
        return ready.json()["status"], ready.status_code, live.status_code

    assert state() == ("ok", 200, 200)
    engine.said = ["worker 1 has decoded for 700 s"]
    assert state() == ("stuck", 503, 503)
    assert client.get("/healthz").json()["stuck"] == engine.said
    engine.said, engine.compiled = [], ["steps has been compiled for 700 s"]
    assert state() == ("stuck", 503, 200)
    assert client.get("/healthz").json()["stuck"] == engine.compiled
    engine.compiled = []
    assert state() == ("ok", 200, 200)
    service.is_draining = True
    assert state() == ("draining", 503, 200)
