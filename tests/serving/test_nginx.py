# tests: wings/serving/connection.py, wings/serving/server.py, wings/serving/origins.py
# tests: /docs/serving.md
"""Tests the configuration of nginx that docs/serving.md shows, with a real nginx."""

import json
import os
import pathlib
import re
import shutil
import socket
import ssl
import subprocess
import time

import pytest

from lingvo_gshard.wings.serving.limits import Limits
from lingvo_gshard.wings.serving.origins import Origins
from lingvo_gshard.wings.serving.service import Service
from tests.serving.open_server import answer, open_server

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAME = "models.example.com"
BODY = {"text": "a b", "beam_size": 1, "most_tokens": 4}

pytestmark = [
    pytest.mark.xdist_group("serving"),
    pytest.mark.skipif(
        not (shutil.which("nginx") and shutil.which("openssl")),
        reason="nginx and openssl are not installed",
    ),
]

CONFIGURATION = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
{user}
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{server}
}}
"""


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Proxy:
    """A running nginx in front of a server."""

    def __init__(self, folder, backend):
        self.port, self.certificate = free_port(), folder / "server.pem"
        key = folder / "server.key"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        command += ["-keyout", key, "-out", self.certificate, "-subj", f"/CN={NAME}"]
        command += ["-addext", f"subjectAltName=DNS:{NAME}"]
        subprocess.run(command, check=True, capture_output=True)
        page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
        (server,) = re.findall(r"```nginx\n(.*?)```", page, re.DOTALL)
        for shown, own in (
            ("listen 443 ssl", f"listen 127.0.0.1:{self.port} ssl"),
            ("/etc/ssl/models.example.com.pem", str(self.certificate)),
            ("/etc/ssl/models.example.com.key", str(key)),
            ("http://127.0.0.1:8000", f"http://127.0.0.1:{backend}"),
        ):
            assert shown in server
            server = server.replace(shown, own)
        user = "user root;" if os.getuid() == 0 else ""
        file = folder / "nginx.conf"
        file.write_text(CONFIGURATION.format(folder=folder, user=user, server=server))
        self._process = subprocess.Popen(["nginx", "-p", folder, "-c", file])
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 10).close()
            except ConnectionRefusedError:
                assert self._process.poll() is None, (folder / "error.log").read_text()
                time.sleep(0.02)
            else:
                break

    def stop(self):
        self._process.terminate()
        self._process.wait()

    def ask(self, method, path, body=None, source="127.0.0.1", **headers):
        """Returns the status and the JSON value of an answer."""
        context = ssl.create_default_context(cafile=self.certificate)
        given = {"Host": f"{NAME}:{self.port}", "Connection": "close", **headers}
        data = json.dumps(body).encode() if body is not None else b""
        given["Content-Length"] = str(len(data))
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        plain = socket.create_connection(("127.0.0.1", self.port), 60, (source, 0))
        with context.wrap_socket(plain, server_hostname=NAME) as opened:
            opened.sendall(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + data)
            return answer(opened)


@pytest.fixture
def service(translating):
    return Service(translating, Limits(timeout=600.0), token="secret")


@pytest.fixture
def proxy(service, tmp_path):
    """Returns nginx in front of a server."""
    with open_server(service, origins=Origins.of("127.0.0.1", [NAME])) as server:
        made = Proxy(tmp_path, server.port)
        yield made
        made.stop()


def test_requests_pass_with_tls_token_and_name(proxy):
    token = {"Authorization": "Bearer secret"}
    assert proxy.ask("GET", "/healthz")[0] == 200
    assert proxy.ask("POST", "/v1/translate", BODY)[0] == 401
    status, found = proxy.ask("POST", "/v1/translate", BODY, **token)
    assert status == 200 and len(found["translations"]) == 1
    own = token | {"Origin": f"https://{NAME}:{proxy.port}"}
    assert proxy.ask("POST", "/v1/translate", BODY, **own)[0] == 200
    foreign = token | {"Origin": "https://evil.example"}
    assert proxy.ask("POST", "/v1/translate", BODY, **foreign)[0] == 403
    assert proxy.ask("GET", "/healthz", Host="evil.example")[0] == 421


def test_the_server_knows_who_asks(proxy, service, monkeypatch):
    clients = []
    submit = service.queue.submit

    def noted(requests, receive, client=""):
        clients.append(client)
        return submit(requests, receive, client)

    monkeypatch.setattr(service.queue, "submit", noted)
    token = {"Authorization": "Bearer secret", "X-Forwarded-For": "198.51.100.7"}
    for source in ("127.0.0.1", "127.0.0.2"):
        assert proxy.ask("POST", "/v1/translate", BODY, source=source, **token)[0] == 200
    assert clients == ["127.0.0.1", "127.0.0.2"]
