# tests: wings/serving/
"""Fuzzes both web servers: every request is answered in time, in a sentence, and never by a fault.

Bodies are valid ones of which a field, some bytes or the nesting were changed. Heads have odd
bytes, numbers and sizes where a header or the URL is parsed, mostly before the token is checked.
"""

import contextlib
import dataclasses
import json
import logging
import random
import socket
import threading
import time

import pytest
from starlette.testclient import TestClient

import lingvo_gshard as gshard
from lingvo_gshard.wings.serving.app import make_app
from lingvo_gshard.wings.serving.limits import Limits
from lingvo_gshard.wings.serving.metrics import Metrics
from lingvo_gshard.wings.serving.model import ServedModel
from lingvo_gshard.wings.serving.origins import Origins
from lingvo_gshard.wings.serving.planning import app as planning
from lingvo_gshard.wings.serving.planning.jobs import PlanJobs
from lingvo_gshard.wings.serving.server import AppServer, ServerOptions, bind
from lingvo_gshard.wings.serving.service import Service
from tests.fine_tuning.conversations import chat_models
from tests.planning import example_plan
from tests.serving.open_server import answer, open_server
from tests.tools.conftest import trained_logdir

__all__ = ["trained_logdir"]

pytestmark = pytest.mark.xdist_group("serving")

# Changed bodies of each endpoint, and changed heads of each server, in the fast and the slow tests.
FEW, MANY = 60, 4_000
FEW_HEADS, MANY_HEADS = 500, 10_000
# Rare kinds of search are given up after a second.
LIMITS = Limits(timeout=1.0, most_beam_size=2, most_kinds=4, queue_size=64)
TOKEN = "s3cret"
# A request is answered or refused within its deadline. Other processes may keep this one waiting.
SECONDS = 20.0
MESSAGE = 2_000

BODIES = {
    "/v1/completions": {
        "prompt": "w6 w7",
        "max_tokens": 3,
        "temperature": 1.0,
        "top_p": 0.9,
        "n": 2,
        "best_of": 2,
        "seed": 1,
        "stop": ["w9"],
        "logprobs": 0,
        "echo": True,
        "stream": False,
        "stream_options": {"include_usage": True},
        "logit_bias": {},
        "user": "me",
        "timeout": 0.9,
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "w6"}]}],
        "max_tokens": 3,
        "temperature": 0,
        "n": 2,
        "seed": 1,
        "stop": "w9",
        "logprobs": True,
        "top_logprobs": 1,
        "stream": False,
        "tools": [],
        "response_format": {"type": "text"},
        "chat_template_kwargs": {"a": 1},
        "stop_token_ids": [9],
        "timeout": 0.9,
    },
    "/v1/generate": {
        "prompt": "w6 w7",
        "most_tokens": 3,
        "least_tokens": 1,
        "best": 2,
        "beam_size": 1,
        "temperature": 1.0,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "length_exponent": 1.0,
        "seed": 1,
        "allowed_tokens": [6, 7, 8],
        "forbidden_tokens": [8],
        "stop": ["w9"],
        "stream": False,
        "routing": False,
        "timeout": 0.9,
    },
}
TRANSLATE = {
    "text": ["ein Hund"],
    "prefix": "",
    "language": None,
    "beam_size": 1,
    "best": 1,
    "length_exponent": 1.0,
    "coverage_weight": 0.0,
    "most_tokens": 3,
    "temperature": 0.0,
    "seed": 1,
    "stop": [],
    "routing": False,
    "timeout": 0.9,
}
PLAN = {
    "topology": "cpu:2",
    "config": "llama",
    "title": "t",
    "mesh": "data=2",
    "strategy": "",
    "batch_rows": 1,
    "length": 8,
    "precision": "",
    "mode": "plan",
}
# Written as they are, since some are no JSON.
ODD = (
    *("null", "true", "-1", "0", "-0.0", "1e308", "-1e308", "1e-320", "1e999", "NaN", "-Infinity"),
    *("2147483647", "2147483648", "4294967296", "9223372036854775808", "9" * 60, "9" * 5_000),
    *(
        '""',
        '"\\u0000"',
        '"\\ud800"',
        '"' + "é" * 3_000 + '"',
        '"${7*7}"',
        '"{{7*7}}"',
        '"../../x"',
    ),
    *("[]", "{}", "[null]", "[[1]]", '{"a": {"b": []}}', '[1, "a"]', "[-1]", "[4294967296]"),
    *("[" * 600 + "]" * 600, "[" * 20_000 + "]" * 20_000, '{"a":' * 600 + "1" + "}" * 600),
    *('[{"role": "user"}]', '[{"role": 5, "content": {}}]', "[" + "1," * 5_000 + "1]"),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Returns a served language model with a chat template."""
    folder = tmp_path_factory.mktemp("fuzzed")
    chat_models.write(folder / "model")
    gshard.import_model(folder / "model", folder / "run", length=32)
    return ServedModel.of_run(gshard.load(folder / "run"))


@pytest.fixture
def faults():
    """Returns the exceptions that the web server logs meanwhile, without those of clients."""
    records = []
    log = logging.getLogger("uvicorn.error")

    def note(record: logging.LogRecord) -> bool:
        if record.exc_info:
            records.append(record)
        return True

    # The server sets handlers of its own.
    log.addFilter(note)
    yield records
    log.removeFilter(note)


def changed(body: dict, chance: random.Random) -> bytes:
    """Returns the JSON of a body after a change or two."""
    parts = {name: json.dumps(value) for name, value in body.items()}
    for name in list(parts):
        # Options must often be right, or the first wrong one is all that is seen.
        if chance.random() < 0.4 and len(parts) > 1:
            del parts[name]
    for _ in range(chance.randint(1, 2)):
        name = chance.choice([*body, "odd", "", "\u0000"])
        parts[name] = chance.choice(ODD)
    text = ", ".join(f"{json.dumps(name)}: {value}" for name, value in parts.items())
    content = f"{{{text}}}".encode(errors="surrogatepass")
    if chance.random() < 0.2:
        at = chance.randrange(len(content))
        content = chance.choice(
            (
                content[:at],
                content[:at] + bytes([chance.randrange(256)]) + content[at + 1 :],
                content[:at] + content[: chance.randrange(200)] + content[at:],
                content + content,
                b"",
            )
        )
    return content


def check(status: int, text: str, said: object) -> None:
    """Raises AssertionError if an answer is no success and no sentence for the client."""
    assert "Traceback" not in text, said
    if status == 200:
        return
    # 503 and 504 are for kinds of search that are not compiled in time.
    assert 400 <= status < 500 or status in (503, 504), (status, text[:500], said)
    error = json.loads(text)["error"]
    assert isinstance(error["message"], str) and 0 < len(error["message"]) < MESSAGE, said
    assert error["type"] in ("invalid_request_error", "server_error")


def fuzz_bodies(client: TestClient, path: str, body: dict, count: int, seed: int) -> None:
    """Posts changed bodies to a path."""
    for number in range(count):
        chance = random.Random(f"{path} {seed} {number}")
        content, began = changed(body, chance), time.monotonic()
        response = client.post(path, content=content)
        check(response.status_code, response.text, (number, content[:300]))
        assert time.monotonic() - began < SECONDS, (number, content[:300])


@contextlib.contextmanager
def client_of(model: ServedModel):
    app = make_app(Service(model, LIMITS))
    with TestClient(app, raise_server_exceptions=False) as opened:
        yield opened


@pytest.mark.parametrize("path", BODIES)
def test_changed_bodies_are_answered(served, path):
    with client_of(served) as client:
        assert client.post(path, json=BODIES[path] | {"timeout": None}).status_code in (200, 504)
        fuzz_bodies(client, path, BODIES[path], FEW, 0)


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
def test_many_changed_bodies_are_answered(served, path):
    with client_of(served) as client:
        fuzz_bodies(client, path, BODIES[path], MANY, 1)


@pytest.mark.slow
def test_changed_bodies_of_translations_are_answered(trained_logdir):
    with client_of(ServedModel.of_run(gshard.load(trained_logdir))) as client:
        fuzz_bodies(client, "/v1/translate", TRANSLATE, MANY, 1)


def plan_of(request, tell, is_over):
    """Returns an example plan in place of a compilation."""
    return example_plan.as_plan(example_plan.example_plan())


@pytest.fixture
def jobs(tmp_path):
    (tmp_path / "llama.json").write_text("{}")
    made = PlanJobs(planning.configs_in(tmp_path), run=plan_of)
    yield made
    made.close()


@pytest.mark.parametrize("count", [FEW * 4, pytest.param(MANY, marks=pytest.mark.slow)])
def test_changed_bodies_of_plans_are_answered(jobs, count):
    app = planning.make_app(jobs, Origins.of("127.0.0.1"))
    client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
    fuzz_bodies(client, "/api/plans", PLAN, count, 0)
    fuzz_bodies(client, "/api/plans", {**PLAN, "content": {"model_type": "llama"}}, count // 4, 1)
    assert client.get("/api/plans").status_code == 200


class OpenPlans:
    """The server of plans on a thread of this process; as `open_server` for models."""

    def __init__(self, jobs: PlanJobs):
        bound, metrics = bind("127.0.0.1", 0), Metrics(lambda: jobs.waiting)
        self.port = bound.getsockname()[1]
        app = planning.make_app(jobs, Origins.of("127.0.0.1"), metrics)
        self._server = AppServer(app, metrics, ServerOptions(), lambda text: None)
        arguments = {"sockets": [bound]}
        self._thread = threading.Thread(target=self._server.run, kwargs=arguments)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


ODD_BYTES = (
    *(b"", b" ", b"\t", b"x", b"\xff\xfe", b"\x80", "é".encode(), "\u0661\u0662".encode(), b"\xb2"),
    *(b"http://[", b"http://]", b"http://[::1", b"//[", b"null", b"http://localhost:99999"),
    *(b"[", b"[::1", b"localhost:x", b"a" * 300, b"%00", b"%", b"*", b"localhost\\", b"http://"),
    *(b"http://\xff", b"http://[v1.a]", b"http://user@[x", "http://⁄".encode(), b"::", b"{", b"'"),
    *(b"-1", b"0", b"1e9", b"99999999999999999999999", b"9" * 5_000, b"0x10", b"+5", b"1_0"),
    *(
        b"Bearer",
        b"Bearer ",
        b"Bearer \xff",
        b"bearer  s3cret x",
        b"Basic \xe2\x82",
        b"Bearer \x00",
    ),
)
HEADERS = (
    *(b"Host", b"Origin", b"Authorization", b"Content-Length", b"Cookie", b"Content-Type"),
    *(b"Transfer-Encoding", b"Expect", b"Connection", b"Upgrade", b"X-Forwarded-For", b"Accept"),
    *(b"Access-Control-Request-Method", b"Access-Control-Request-Headers", b"Forwarded", b"Range"),
)
URLS = (
    *(b"/v1/completions", b"/api/plans", b"/", b"/healthz", b"/metrics", b"/v1/models/%FF%00"),
    *(
        b"//[",
        b"http://[",
        b"http://[::1/",
        b"*",
        b"/\xff\xfe",
        b"/%",
        b"/%zz?%ff=%",
        b"/?\xc3\x28",
    ),
    *(b"/v1/models/" + b"a" * 3_000, b"/api/plans/..%2f..", b"/saved?plans=%ff,,\x01", b"/saved"),
    *(b"/saved?plans=" + b"a," * 500, b"/v1/models/..;/", b"?", b"#", b"/a b", b"\\", b"/\x7f"),
)
METHODS = (b"GET", b"POST", b"HEAD", b"OPTIONS", b"PUT", b"TRACE", b"PATCH", b"DELETE")


def head(chance: random.Random) -> bytes:
    """Returns a request whose head has something odd."""
    lines = {b"Host": [b"localhost"], b"Connection": [b"close"]}
    if chance.random() < 0.5:
        lines[b"Authorization"] = [f"Bearer {TOKEN}".encode()]
    body = chance.choice((b"", b"{}", b"{", b'{"prompt": "w6", "max_tokens": 1}'))
    lines[b"Content-Length"] = [b"%d" % len(body)]
    for _ in range(chance.randint(0, 2)):
        name = chance.choice(HEADERS)
        value = chance.choice(ODD_BYTES)
        lines[name] = [*lines.get(name, ()), value] if chance.random() < 0.2 else [value]
    method, url = chance.choice(METHODS), chance.choice(URLS)
    version = chance.choice((b"HTTP/1.1",) * 6 + (b"HTTP/1.0", b"HTTP/9.9", b""))
    fields = b"".join(b"%b: %b\r\n" % (k, v) for k, values in lines.items() for v in values)
    return b"%b %b %b\r\n%b\r\n%b" % (method, url, version, fields, body)


def fuzz_heads(port: int, count: int, seed: int) -> None:
    """Sends odd heads on connections of their own."""
    for number in range(count):
        request = head(random.Random(f"head {seed} {number}"))
        with socket.create_connection(("127.0.0.1", port), SECONDS) as opened:
            opened.sendall(request)
            # A body that never comes is not waited for longer than its deadline.
            opened.shutdown(socket.SHUT_WR)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while part := opened.recv(65536):
                    received += part
        # Who closes its side in the midst of a request need not be answered.
        for one in received.split(b"HTTP/1.1 ")[1:]:
            status, (_, _, text) = int(one.split()[0]), one.partition(b"\r\n\r\n")
            is_head = request.startswith(b"HEAD ")
            assert b"Traceback" not in one, request
            assert status < 500 or status in (503, 504), request
            if status >= 400 and status != 499 and not is_head:
                message = json.loads(text)["error"]["message"]
                assert 0 < len(message) < MESSAGE, request


@pytest.mark.parametrize("count", [FEW_HEADS, pytest.param(MANY_HEADS, marks=pytest.mark.slow)])
def test_odd_heads_are_answered_by_the_server_of_a_model(served, faults, count):
    service = Service(served, LIMITS, TOKEN)
    for origins in (Origins.of("127.0.0.1"), Origins.of("0.0.0.0", ["*"], ["https://a.example"])):
        with open_server(service, origins=origins) as opened:
            fuzz_heads(opened.port, count, len(origins.hosts))
            assert opened.get()[0] == 200
    assert not [record.getMessage() for record in faults]


@pytest.mark.parametrize("count", [FEW_HEADS, pytest.param(MANY_HEADS, marks=pytest.mark.slow)])
def test_odd_heads_are_answered_by_the_server_of_plans(jobs, faults, count):
    opened = OpenPlans(jobs)
    try:
        fuzz_heads(opened.port, count, 0)
    finally:
        opened.close()
    assert not [record.getMessage() for record in faults]


@pytest.mark.parametrize(
    "value", [b"http://[", b"http://[::1", b"//[", b"http://[v1.a]x", "http://⁄".encode()]
)
@pytest.mark.parametrize("of_plans", [False, True])
def test_an_origin_that_is_none_is_foreign(served, jobs, faults, value, of_plans):
    """It is parsed before the token is checked."""
    service = Service(served, LIMITS, TOKEN)
    with contextlib.ExitStack() as stack:
        if of_plans:
            port = stack.enter_context(contextlib.closing(OpenPlans(jobs))).port
        else:
            options = {"origins": Origins.of("127.0.0.1")}
            port = stack.enter_context(open_server(service, **options)).port
        with socket.create_connection(("127.0.0.1", port), SECONDS) as opened:
            lines = b"Host: localhost\r\nConnection: close\r\nOrigin: %b\r\n\r\n" % value
            opened.sendall(b"GET /metrics HTTP/1.1\r\n" + lines)
            status, body = answer(opened)
    assert status == 403 and body["error"]["code"] == "foreign_origin" and not faults


FAULTS = (
    *(RecursionError(), ZeroDivisionError("secret"), MemoryError(), KeyError("secret")),
    *(UnicodeDecodeError("utf-8", b"x", 0, 1, "secret"), OSError(5, "secret"), RuntimeError()),
    *(AssertionError("secret"), StopIteration("secret"), SyntaxError("secret"), TimeoutError()),
)


@pytest.mark.parametrize("path", [*BODIES, "/v1/models", "/metrics", "/", "/healthz"])
def test_a_fault_of_ours_is_answered_logged_once_and_counted(served, faults, path, monkeypatch):
    left = list(FAULTS)

    def fail(*_, **__):
        raise left[0]

    service = Service(served, LIMITS)
    monkeypatch.setattr("lingvo_gshard.wings.serving.page.to_html", fail)
    monkeypatch.setattr("lingvo_gshard.wings.serving.endpoints.state._described", fail)
    monkeypatch.setattr(service, "read", fail)
    monkeypatch.setattr(service.metrics, "text", fail)
    monkeypatch.setattr(served.engine, "stuck", fail)
    body = json.dumps(BODIES.get(path, {}))
    method = "POST" if path in BODIES else "GET"
    request = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    with open_server(service) as opened:
        for number in range(1, len(FAULTS) + 1):
            message = f"{request}Content-Length: {len(body)}\r\n\r\n{body}"
            with opened.connect(message.encode()) as one:
                status, found = answer(one)
            assert status == 500, left[0]
            assert found["error"]["message"] == "the server failed; its log says why"
            assert len(faults) == number, left[0]
            assert service.metrics.errors.labels(path, "500")._value.get() == number
            left.pop(0)


@pytest.mark.parametrize("path", BODIES)
def test_a_fault_in_the_midst_of_a_stream_is_its_last_event(served, faults, path, monkeypatch):
    class Failing:
        """An engine's answer that fails after its first event."""

        def __init__(self, request):
            self.request = request

        def listen(self, listener):
            listener(ZeroDivisionError("secret"))

        def cancel(self):
            """Does nothing: it is over."""

    service = Service(served, LIMITS)
    monkeypatch.setattr(served.engine, "submit_all", lambda asked: list(map(Failing, asked)))
    body = {name: value for name, value in BODIES[path].items() if name in ("prompt", "messages")}
    with TestClient(make_app(service), raise_server_exceptions=False) as client:
        response = client.post(path, json=body | {"stream": True})
    *_, last, rest = response.text.split("\n\n")
    error = json.loads(last.removeprefix("event: error\n").removeprefix("data: "))["error"]
    assert (error["message"], rest) == ("the server failed; its log says why", "")
    assert len(faults) == 1 and faults[0].exc_info
    assert service.metrics.errors.labels(path, "500")._value.get() == 1


def test_a_conversation_that_takes_too_long_is_given_up(served):
    """A template that computes for ever must not hold the server."""
    over = threading.Event()

    class Slow:
        """A template that renders until the test is over."""

        def __getattr__(self, name):
            return getattr(served.template, name)

        def render(self, *_, **__):
            over.wait(30)
            raise AssertionError

    slow = dataclasses.replace(served, template=Slow())
    body = {"messages": [{"role": "user", "content": "w6"}], "timeout": 0.5}
    try:
        with open_server(Service(slow, LIMITS)) as opened:
            data = json.dumps(body)
            lines = f"Host: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
            began = time.monotonic()
            path = "/v1/chat/completions"
            with opened.connect(f"POST {path} HTTP/1.1\r\n{lines}{data}".encode()) as one:
                assert opened.get()[0] == 200
                assert answer(one)[0] == 504
            assert time.monotonic() - began < SECONDS
    finally:
        over.set()
