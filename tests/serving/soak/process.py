"""ServerProcess: gshard-serve as a process that is restarted, measured and disturbed."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
_START_SECONDS = 300.0


class ServerProcess:
    """A server in a process of its own, on the same port after a restart."""

    def __init__(self, logdir: pathlib.Path, folder: pathlib.Path, stuck_seconds: float):
        self._folder = folder
        self.log = folder / "server.log"
        self._command = [sys.executable, "-m", "lingvo_gshard", "serve", f"--logdir={logdir}"]
        self._command += [f"--stuck_seconds={stuck_seconds:g}", "--drain_seconds=60"]
        # Few, so that rare options soon take the place of others.
        self._command.append("--most_kinds=6")
        self._process: subprocess.Popen | None = None
        self.port = 0

    def start(self) -> None:
        """Starts the server, and waits until it listens."""
        port_file = self._folder / "port"
        port_file.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, f"--port={self.port}", f"--port_file={port_file}"],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
            )
        limit = time.monotonic() + _START_SECONDS
        while not port_file.exists():
            if self._process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"the server did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)
        self.port = int(port_file.read_text())

    def stop(self) -> int:
        """Stops the server as an operator does; returns its exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(120)

    def kill(self) -> None:
        """Ends the server if it runs."""
        if self._process and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def bytes(self) -> int:
        """Returns the resident memory of the server, without the compiler's; 0 if it has ended."""
        assert self._process is not None
        try:
            status = pathlib.Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        except OSError:
            return 0
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        return int(found[1]) * 1024 if found else 0

    def descriptors(self) -> int:
        """Returns the number of descriptors that the server has open."""
        assert self._process is not None
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def compilers(self) -> list[int]:
        """Returns the processes that compile for the server."""
        assert self._process is not None
        tasks = pathlib.Path(f"/proc/{self._process.pid}/task").glob("*/children")
        return [int(child) for file in tasks for child in file.read_text().split()]

    def stop_compiler(self) -> bool:
        """Has the compiler stand still, as one that hangs; returns whether there was one."""
        found = self.compilers()
        for process in found:
            os.kill(process, signal.SIGSTOP)
        return bool(found)
