"""Starts emulators of buckets as processes of their own, on the loopback address."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

from tests.object_stores.front import Faults, Front

BUCKET = "runs"
_START_SECONDS = 60
_SCRIPTS = pathlib.Path(sys.executable).parent


@dataclasses.dataclass(frozen=True)
class Emulator:
    """A running emulator with one empty bucket, and a server before it that adds faults.

    Attributes:
      scheme: "gs" or "s3".
      environment: settings for a process that uses it.
      front: the server before it.
    """

    scheme: str
    environment: dict[str, str]
    front: Front

    @property
    def bucket(self) -> str:
        """The URL of the bucket."""
        return f"{self.scheme}://{BUCKET}"

    @property
    def faults(self) -> Faults:
        """What goes wrong."""
        return self.front.faults


@contextlib.contextmanager
def running(scheme: str) -> Iterator[Emulator]:
    """Gives an emulator of "gs" or "s3" while the context lasts."""
    port = _free_port()
    if scheme == "gs":
        command = ["gcp-storage-emulator", "start", f"--port={port}", "--in-memory"]
        command += ["--host=127.0.0.1", f"--default-bucket={BUCKET}"]
    else:
        command = ["moto_server", "-p", str(port), "-H", "127.0.0.1"]
    script, *arguments = command
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, str(_SCRIPTS / script), *arguments], **quiet)
    try:
        _wait(process, port)
        front = Front(port, scheme)
        if scheme == "s3":
            bucket = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
            urllib.request.urlopen(bucket, timeout=10).close()
        yield Emulator(scheme, _environment(scheme, front.url), front)
        front.close()
    finally:
        process.kill()
        process.wait()


def _environment(scheme: str, url: str) -> dict[str, str]:
    """Returns the settings that docs/data.md gives for an emulator."""
    if scheme == "gs":
        return {
            "STORAGE_EMULATOR_HOST": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "any",
            "NO_GCE_CHECK": "true",
        }
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def _wait(process: subprocess.Popen, port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        assert process.poll() is None, "the emulator ended"
        assert time.monotonic() < deadline, "the emulator does not listen"
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def environment_with(emulator: Emulator) -> dict[str, str]:
    """Returns the environment of a new process that uses an emulator."""
    return {**os.environ, **emulator.environment}
