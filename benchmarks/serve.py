"""Measures gshard-serve with many clients at once, against the translator in this process.

    python -m benchmarks serve --logdir=runs/quickstart --clients=300 --seconds=60

starts gshard-serve with a trained translation model, lets --clients send one sentence after another
for --seconds, and compares every answer with the translation in this process. The translator in
this process translates the same sentences before and after. ratio is the server's generated tokens
per second over the translator's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http
import http.client
import math
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import rich.box
import rich.table
from absl import flags

from benchmarks import common, http_load
from lingvo_gshard.api import tables
from lingvo_gshard.api.run import Run, load
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.progress import Progress
from lingvo_gshard.core.signals import called_before_abrupt_end
from lingvo_gshard.tools.console import Console, transient_stages
from lingvo_gshard.tools.flags.run import required_logdir
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.translator import Translation, Translator

_MOST_SENTENCES = 500
_HOST = "127.0.0.1"
_START_SECONDS = 900.0
# Translations with scores this close are equally good: rounding decides which one a search finds.
_CLOSE = 1e-3


@dataclasses.dataclass(frozen=True)
class ServerTiming:
    """One measurement. Each latency is the seconds that a request of one sentence takes.

    Attributes:
      clients: clients that send one request after another.
      beam_size: hypotheses of the search.
      seconds: length of the measurement.
      requests: requests answered with status 200 during the measurement.
      lost: requests that got no answer, or another status.
      wrong: answers that differ from the offline translation.
      ties: answers that differ from the offline translation but have the same score, up to
        rounding.
      latency_50: half of the requests took at most this long.
      latency_95: 95% of the requests took at most this long.
      latency_99: 99% of the requests took at most this long.
      requests_per_second: answered requests.
      tokens_per_second: generated tokens of answered requests.
      offline_tokens_per_second: generated tokens per second of the translator in this process,
        without a server, before and after the measurement.
      ratio: tokens_per_second / offline_tokens_per_second.
      server_bytes: the largest memory that the server's process has used.
      exit_code: exit code of the server after SIGTERM.
    """

    clients: int
    beam_size: int
    seconds: float
    requests: int
    lost: int
    wrong: int
    ties: int
    latency_50: float
    latency_95: float
    latency_99: float
    requests_per_second: float
    tokens_per_second: float
    offline_tokens_per_second: float
    ratio: float
    server_bytes: int
    exit_code: int


def define_flags() -> flags.FlagValues:
    """Returns this subcommand's flags."""
    values = common.define_flags(experiment=False)
    flags.DEFINE_string("logdir", None, "Directory of the trained model.", flag_values=values)
    common.define_integer(values, "clients", 300, "Clients that send requests at the same time.")
    common.define_integer(values, "seconds", 60, "How long the server is measured.")
    common.define_integer(values, "beam_size", 4, "Hypotheses of each search.")
    return values


def run(values: flags.FlagValues, console: Console) -> int:
    """Measures, prints the table, writes the row, and returns the exit code."""
    logdir = required_logdir(values)
    with transient_stages(console, "starting") as progress:
        row = measure(logdir, values.clients, values.seconds, values.beam_size, progress)
    print_row(console, row)
    return common.write(values, [row], "CPU")


def measure(
    logdir: str, clients: int, seconds: float, beam_size: int, progress: Progress
) -> ServerTiming:
    """Returns the measurement of a server that this starts, and stops by SIGTERM.

    Args:
      logdir: directory of a run that translates.
      clients: clients that send one request after another.
      seconds: how long to measure. Each sentence is sent once before that.
      beam_size: hypotheses of the search.
      progress: is told each stage as it begins.

    Raises:
      UserError: the run does not translate, or the server does not start.
    """
    run = load(logdir)
    run.check_decoder(Translator)
    sentences = _sentences(run)
    offline = _Offline(run.translator(DecodingOptions(beam_size=beam_size)), sentences)
    progress.begin("translating without a server")
    rates = [offline.rate(seconds / 4)]
    with _server(logdir, beam_size, clients, progress) as (process, port):
        load_ = _Checked(port, sentences, beam_size, offline.best)
        progress.begin(f"{clients} clients: each sentence once")
        load_.run(clients, requests=len(sentences))
        progress.begin(f"{clients} clients for {seconds:.0f} s")
        result, took = load_.run(clients, seconds=seconds)
        peak = _peak_bytes(process.pid)
        process.send_signal(signal.SIGTERM)
        exit_code = process.wait()
    progress.begin("translating without a server")
    rates.append(offline.rate(seconds / 4))
    rate, tokens = float(np.mean(rates)), result.tokens / took
    half, most, nearly_all = np.quantile(result.latencies or [np.nan], [0.5, 0.95, 0.99])
    return ServerTiming(
        clients=clients,
        beam_size=beam_size,
        seconds=took,
        requests=len(result.latencies),
        lost=result.lost,
        wrong=result.wrong,
        ties=result.ties,
        latency_50=float(half),
        latency_95=float(most),
        latency_99=float(nearly_all),
        requests_per_second=len(result.latencies) / took,
        tokens_per_second=tokens,
        offline_tokens_per_second=rate,
        ratio=tokens / rate,
        server_bytes=peak,
        exit_code=exit_code,
    )


def print_row(console: Console, row: ServerTiming) -> None:
    """Prints a measurement."""
    table = rich.table.Table(box=rich.box.SIMPLE, show_header=False)
    for name, text in (
        ("clients", f"{row.clients:,} for {row.seconds:.0f} s, beam {row.beam_size}"),
        ("answered", f"{row.requests:,}, {row.requests_per_second:,.1f}/s"),
        ("lost, wrong", f"{row.lost:,}, {row.wrong:,}; {row.ties:,} with an equal score"),
        ("latency", f"{row.latency_50:.3f} s median, {row.latency_95:.3f} s at 95%"),
        ("tokens", f"{row.tokens_per_second:,.0f}/s"),
        ("offline", f"{row.offline_tokens_per_second:,.0f}/s; ratio {row.ratio:.2f}"),
        ("server's memory", f"{row.server_bytes / 2**20:,.0f} MiB at most"),
        ("SIGTERM", f"exit code {row.exit_code}"),
    ):
        table.add_row(name, text)
    tables.print_table(console, table)


def _sentences(run: Run) -> list[str]:
    """Returns different sentences of the test split."""
    input_: Any = run.input
    rows = input_.rows("test")
    found = list(dict.fromkeys(row.source for row in rows))
    return [found[i] for i in np.linspace(0, len(found) - 1, _MOST_SENTENCES, dtype=int)]


class _Offline:
    """The translator of this process."""

    def __init__(self, translator: Translator, sentences: Sequence[str]):
        self._translator, self._sentences = translator, sentences
        found = translator.translate(sentences).best
        self.best: list[Translation | None] = [best[0] if best else None for best in found]

    def rate(self, seconds: float) -> float:
        """Returns generated tokens per second, of as many rounds as fill a time."""
        tokens, started = 0, time.monotonic()
        while not tokens or time.monotonic() - started < seconds:
            best = self._translator.translate(self._sentences).best
            tokens += sum(len(found[0].log_probabilities) for found in best if found)
        return tokens / (time.monotonic() - started)


@dataclasses.dataclass
class _Result:
    """The answers that clients have seen."""

    latencies: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0
    lost: int = 0
    wrong: int = 0
    ties: int = 0


class _Checked:
    """Requests of one sentence, whose answers are compared with the offline translations."""

    def __init__(
        self,
        port: int,
        sentences: Sequence[str],
        beam_size: int,
        expected: Sequence[Translation | None],
    ):
        bodies = [msgspec.json.encode({"text": one, "beam_size": beam_size}) for one in sentences]
        self._expected, self._result = expected, _Result()
        self._load = http_load.HttpLoad(port, "/v1/translate", bodies, self._judge)

    def run(
        self, clients: int, seconds: float = math.inf, requests: float = math.inf
    ) -> tuple[_Result, float]:
        """Runs clients for a time, or until a number of requests are sent.

        Returns:
          What they have seen, and the seconds until the last answer.
        """
        self._result = _Result()
        return self._result, self._load.run(clients, seconds, requests)

    def _judge(self, number: int, status: int, body: bytes, seconds: float) -> None:
        result = self._result
        if status != http.HTTPStatus.OK:
            result.lost += 1
            return
        (answer,) = msgspec.json.decode(body)["translations"]
        expected, best = self._expected[number], answer["alternatives"][:1]
        result.latencies.append(seconds)
        result.tokens += sum(len(one["tokens"]) for one in best)
        if answer["text"] != (expected.text if expected else ""):
            close = expected and best and abs(best[0]["score"] - expected.score) < _CLOSE
            result.ties += bool(close)
            result.wrong += not close


@contextlib.contextmanager
def _server(
    logdir: str, beam_size: int, clients: int, progress: Progress
) -> Iterator[tuple[subprocess.Popen, int]]:
    """Starts gshard-serve, and yields the process and the port when the server is ready."""
    with tempfile.TemporaryDirectory() as folder:
        port_file, log = pathlib.Path(folder) / "port", pathlib.Path(folder) / "log"
        command = [sys.executable, "-m", "lingvo_gshard", "serve", f"--logdir={logdir}"]
        command += ["--port=0", f"--port_file={port_file}", f"--queue_size={max(1024, clients)}"]
        command.append(f"--most_beam_size={max(8, beam_size)}")
        with log.open("w") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=stream)
        try:
            with called_before_abrupt_end(process.kill):
                progress.begin("starting the server")
                limit = time.monotonic() + _START_SECONDS
                while not _answers(port_file):
                    if process.poll() is not None or time.monotonic() > limit:
                        raise UserError(f"gshard-serve did not start: {log.read_text().strip()}")
                    time.sleep(0.1)
                yield process, int(port_file.read_text())
        finally:
            process.kill()
            process.wait()


def _answers(port_file: pathlib.Path) -> bool:
    """Returns whether a server has written its port and answers there."""
    if not port_file.exists() or not port_file.read_text().strip():
        return False
    connection = http.client.HTTPConnection(_HOST, int(port_file.read_text()), timeout=10)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _peak_bytes(process: int) -> int:
    """Returns the largest resident memory that a process has used."""
    status = pathlib.Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0
