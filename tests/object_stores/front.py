"""A server before an emulator: it adds what the emulator lacks, and faults on demand.

gcp-storage-emulator ignores preconditions of writes and does not name the generation of what it
returns. Both are part of Google Cloud Storage, and the lock of a run depends on them
(https://cloud.google.com/storage/docs/request-preconditions).
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import http.server
import json
import re
import threading
import time
import urllib.parse

_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


@dataclasses.dataclass
class Faults:
    """What goes wrong. Changed by tests while requests come in.

    Attributes:
      seconds: the time by which each answer is late.
      failing: number of the next requests that are answered with `status`.
      status: the status of failing answers.
      only: a part of the address of requests that may fail; "" lets all fail.
      refuses: whether the token of all requests is refused.
      is_gone: whether the bucket is not there any more.
      requests: the requests so far, as "METHOD address".
    """

    seconds: float = 0.0
    failing: int = 0
    status: int = 503
    only: str = ""
    refuses: bool = False
    is_gone: bool = False
    requests: list[str] = dataclasses.field(default_factory=list)

    def clear(self) -> None:
        """Ends all faults."""
        self.__dict__.update(dataclasses.asdict(Faults()))


class Front:
    """The server, in threads of this process.

    Attributes:
      url: its address.
      faults: what goes wrong.
    """

    def __init__(self, port: int, scheme: str):
        """Starts it.

        Args:
          port: where the emulator listens.
          scheme: "gs" or "s3".
        """
        self.faults = Faults()
        handler = type("Handler", (_Handler,), {"front": self, "target": port, "scheme": scheme})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.writing = threading.Lock()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stops it."""
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing: clients go away when they have read enough."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    front: Front
    target: int
    scheme: str

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def _answer(self) -> None:
        body, faults = self._body(), self.front.faults
        faults.requests.append(f"{self.command} {self.path}")
        if faults.seconds:
            time.sleep(faults.seconds)
        if faults.refuses:
            self._refuse()
        elif faults.is_gone:
            self._fail(404, "NoSuchBucket", "The specified bucket does not exist")
        elif faults.failing > 0 and faults.only in self.path:
            faults.failing -= 1
            self._fail(faults.status, "ServiceUnavailable", "Please try again later")
        else:
            self._forward(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _answer

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _forward(self, body: bytes) -> None:
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
        expected = query.get("ifGenerationMatch")
        if self.scheme == "s3" or expected is None:
            # A content and its generation are asked for one after the other.
            is_pair = self.scheme == "gs" and self.command == "GET" and "alt=media" in self.path
            with self.front.writing if is_pair else contextlib.nullcontext():
                answer = self._ask(self.command, self.path, body)
            self._send(*answer)
            return
        with self.front.writing:
            if self._generation(self._object(query, body)) == expected:
                self._send(*self._ask(self.command, self.path, body))
            else:
                self._fail(412, "conditionNotMet", "At least one precondition did not hold")

    def _ask(self, method: str, path: str, body: bytes) -> tuple[int, list, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.target)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_BY_HOP}
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in _HOP_BY_HOP]
        if self.scheme == "gs" and method == "GET" and "alt=media" in path:
            headers.append(("x-goog-generation", self._generation(path.partition("?")[0])))
        if method == "HEAD" and (size := answer.getheader("Content-Length")):
            headers.append(("Content-Length", size))
        return answer.status, headers, content

    def _object(self, query: dict[str, str], body: bytes) -> str:
        """Returns the address of the object that a request writes or deletes."""
        path = urllib.parse.urlsplit(self.path).path
        if self.command == "DELETE":
            return path
        # An upload in several parts has the name in the JSON before its content.
        name = query.get("name") or json.loads(re.search(rb"\{.*?\}", body)[0])["name"]
        return f"{path.replace('/upload', '')}/{urllib.parse.quote(name, safe='')}"

    def _generation(self, address: str) -> str:
        """Returns the generation of an object; "0" if it is not there."""
        connection = http.client.HTTPConnection("127.0.0.1", self.target)
        try:
            connection.request("GET", address.replace("/download", ""))
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        return json.loads(content)["generation"] if answer.status == 200 else "0"

    def _refuse(self) -> None:
        if self.scheme == "gs":
            self._fail(401, "authError", "Invalid Credentials")
        else:
            self._fail(400, "ExpiredToken", "The provided token has expired.")

    def _fail(self, status: int, code: str, message: str) -> None:
        if self.scheme == "gs":
            error = {"code": status, "message": message, "errors": [{"reason": code}]}
            content, kind = json.dumps({"error": error}).encode(), "application/json"
        else:
            words = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
            content, kind = words.encode(), "application/xml"
        self._send(status, [("Content-Type", kind)], content)

    def _send(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
