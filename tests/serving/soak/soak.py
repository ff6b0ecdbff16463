"""The soak of the server: honest clients among hostile ones, restarts, and a stuck compiler."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from lingvo_gshard.api.run import load
from lingvo_gshard.wings.inference.options import DecodingOptions
from tests.data import corpora
from tests.serving.soak import hostile
from tests.serving.soak.clients import PATIENCE, Question, Server, Tally, exchange, honest, message
from tests.serving.soak.process import ServerProcess
from tests.tools import tiny_translation

# Seconds in which a server that restarts need not answer.
_RESTART_SECONDS = 120.0
_SECONDS_OF_TRY = 15.0
# Rounds of all questions before the soak begins, until one takes less than some seconds.
_WARM_UPS = 6
_WARM_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What happens in a soak.

    Attributes:
      seed: of what clients do.
      seconds: how long they do it.
      clients: honest clients.
      attackers: hostile ones, each of which behaves badly all the time.
      restarts: restarts of the server, in the first third.
      stuck_seconds: after which the server replaces a compiler that does not answer.
      pause: mean seconds between an answer and an honest client's next question.
      most_growth: by how much memory may grow between the middle and the end. It is flat once the
        programs of all common lengths are loaded, which takes minutes.
    """

    seed: int = 0
    seconds: float = 600.0
    clients: int = 300
    attackers: int = 24
    restarts: int = 2
    stuck_seconds: float = 60.0
    pause: float = 4.0
    most_growth: float = 0.05


@dataclasses.dataclass
class Outcome:
    """What a soak found.

    Attributes:
      tally: what honest clients have seen.
      attacks: how often each hostile behavior was shown.
      failed_attacks: what hostile clients saw that they should not, in words.
      exit_codes: of the server, at each restart and at the end.
      memory: mebibytes of the server over the last life: each second, without the first half.
      descriptors: of the server at the end, after all clients have left.
      stuck_compilers: compilers that were made to stand still.
      server_errors: answers with a status of 500 and more that the server has counted, but for 503
        and 504.
      tracebacks: in the server's log.
      most_growth: by how much memory might grow.
    """

    tally: Tally
    attacks: dict[str, int]
    failed_attacks: list[str]
    exit_codes: list[int]
    memory: list[float]
    descriptors: int
    stuck_compilers: int
    server_errors: float
    tracebacks: int
    most_growth: float

    @property
    def growth(self) -> float:
        """By how much memory grew from the first fifth to the last of what was measured."""
        fifth = max(len(self.memory) // 5, 1)
        first, last = self.memory[:fifth], self.memory[-fifth:]
        return statistics.median(last) / statistics.median(first) - 1 if self.memory else 0.0

    def p99(self, seconds: list[float]) -> float:
        """Returns the latency that 99 of 100 questions did not pass."""
        return float(np.quantile(seconds, 0.99)) if seconds else float("nan")

    @property
    def problems(self) -> list[str]:
        """What is wrong, in words."""
        found = [*self.tally.lost, *self.tally.wrong, *self.failed_attacks]
        if any(self.exit_codes):
            found.append(f"exit codes of the server: {self.exit_codes}")
        if self.growth > self.most_growth:
            found.append(f"memory grew by {self.growth:.1%}")
        if self.server_errors or self.tracebacks:
            found.append(f"{self.server_errors:g} errors and {self.tracebacks} tracebacks")
        if not self.tally.seconds:
            found.append("no honest question was answered")
        return found


def soak(plan: Plan, logdir: pathlib.Path, folder: pathlib.Path, say: Callable[[str], None]):
    """Runs a soak and returns its Outcome.

    Args:
      plan: what happens.
      logdir: a run that translates.
      folder: for the server's log and its programs.
      say: shows a line.
    """
    say("translating without a server")
    questions = _questions(logdir)
    process = ServerProcess(logdir, folder, plan.stuck_seconds)
    try:
        process.start()
        say(f"the server listens on port {process.port}")
        return asyncio.run(_Soak(plan, process, questions, say).run())
    finally:
        process.kill()


def train(folder: pathlib.Path) -> pathlib.Path:
    """Returns the directory of a tiny model that translates, trained now."""
    from lingvo_gshard.tools import train as command

    arguments = tiny_translation.write(folder)
    command.main(["gshard-train", *arguments, f"--logdir={folder}/run", "--steps=20"])
    return folder / "run"


def _questions(logdir: pathlib.Path) -> list[Question]:
    """Returns bodies of one sentence and of several, with their translations."""
    sources = list(dict.fromkeys(row.source for row in corpora.rows(120)))
    translator = load(logdir).translator()
    questions = []
    for beam in (1, 4):
        options = DecodingOptions(beam_size=beam, most_tokens=12)
        texts = translator.translate(sources, options=options).texts
        for first, count in [*((n, 1) for n in range(len(sources))), *((n, 5) for n in (3, 9, 20))]:
            body = {
                "text": sources[first : first + count],
                "beam_size": beam,
                "most_tokens": 12,
                "timeout": 60,
            }
            expected = tuple(texts[first : first + count])
            questions.append(Question(json.dumps(body).encode(), expected))
    return questions


class _Soak:
    """A soak under way."""

    def __init__(
        self,
        plan: Plan,
        process: ServerProcess,
        questions: list[Question],
        say: Callable[[str], None],
    ):
        self._plan, self._process, self._questions, self._say = plan, process, questions, say
        self._server, self._tally = Server(process.port), Tally()
        self._attacks = dict.fromkeys((one.__name__ for one in hostile.BEHAVIORS), 0)
        self._failed: list[str] = []
        self._exit_codes: list[int] = []
        self._memory: list[float] = []
        self._stuck = 0

    async def run(self) -> Outcome:
        await self._warm_up()
        plan, began = self._plan, time.monotonic()
        end = began + plan.seconds
        chances = (random.Random(f"{plan.seed} {n}") for n in range(10_000))
        clients = [
            asyncio.create_task(
                honest(self._server, self._choose, self._tally, next(chances), end, plan.pause)
            )
            for _ in range(plan.clients)
        ]
        attackers = [self._attack(next(chances), end) for _ in range(plan.attackers)]
        others = (self._restart(began), self._hold_compiler(began, end))
        watchers = (self._measure(began, end), self._report(end))
        await asyncio.gather(*clients, *attackers, *others, *watchers)
        await asyncio.sleep(2.0)
        descriptors, errors = self._process.descriptors(), await self._server_errors()
        self._exit_codes.append(await asyncio.to_thread(self._process.stop))
        return Outcome(
            self._tally,
            self._attacks,
            self._failed,
            self._exit_codes,
            self._memory,
            descriptors,
            self._stuck,
            errors,
            self._process.log.read_text(errors="replace").count("Traceback"),
            plan.most_growth,
        )

    async def _warm_up(self) -> None:
        """Has all questions answered at once, until no program is compiled for them any more."""
        for number in range(1, _WARM_UPS + 1):
            began = time.monotonic()
            asked = (
                exchange(self._server.port, message(self._server.port, one.body))
                for one in self._questions
            )
            statuses = [status for status, _ in await asyncio.gather(*asked)]
            took = time.monotonic() - began
            self._say(f"warm-up {number}: {statuses.count(200)} answered in {took:.1f} s")
            if statuses.count(200) == len(statuses) and took < _WARM_SECONDS:
                return

    def _choose(self, chance: random.Random) -> Question:
        return chance.choice(self._questions)

    async def _attack(self, chance: random.Random, end: float) -> None:
        while time.monotonic() < end:
            behavior = chance.choice(hostile.BEHAVIORS)
            self._attacks[behavior.__name__] += 1
            try:
                # The server may hang up on all of them at any time.
                with contextlib.suppress(OSError, EOFError, TimeoutError, IndexError):
                    async with asyncio.timeout(_SECONDS_OF_TRY):
                        await behavior(self._server.port, chance)
            except AssertionError as error:
                self._failed.append(f"{behavior.__name__}: {error}")
            await asyncio.sleep(chance.random())

    async def _restart(self, began: float) -> None:
        plan = self._plan
        for number in range(1, plan.restarts + 1):
            moment = began + number * plan.seconds / 3 / (plan.restarts + 1)
            await asyncio.sleep(max(moment - time.monotonic(), 0))
            self._server.restarts_until = time.monotonic() + _RESTART_SECONDS
            self._exit_codes.append(await asyncio.to_thread(self._process.stop))
            await asyncio.to_thread(self._process.start)
            # Connections that the old server has cut off are told by now.
            self._server.restarts_until = time.monotonic() + 2.0
            self._say(f"restarted, exit code {self._exit_codes[-1]}")

    async def _hold_compiler(self, began: float, end: float) -> None:
        """Has a compiler stand still once, after the restarts."""
        await asyncio.sleep(max(began + 0.35 * self._plan.seconds - time.monotonic(), 0))
        while not self._stuck and time.monotonic() < end:
            # Ask for what hardly anybody has asked for, so that there is a compiler.
            body = {"text": "ein Hund", "beam_size": 7, "coverage_weight": 0.5, "timeout": 1.0}
            with contextlib.suppress(OSError, EOFError):
                await exchange(
                    self._server.port, message(self._server.port, json.dumps(body).encode())
                )
            self._stuck += self._process.stop_compiler()
        if self._stuck:
            self._say("a compiler stands still")

    async def _measure(self, began: float, end: float) -> None:
        await asyncio.sleep(max(began + 0.5 * self._plan.seconds - time.monotonic(), 0))
        while time.monotonic() < end:
            if not self._server.is_restarting:
                self._memory.append(self._process.bytes() / 2**20)
            await asyncio.sleep(1.0)

    async def _report(self, end: float) -> None:
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(60.0, left))
            tally = self._tally
            self._say(
                f"{len(tally.seconds):,} answered, {tally.retries} tried again, "
                f"{len(tally.lost)} lost, {len(tally.wrong)} wrong; "
                f"{self._process.bytes() / 2**20:,.0f} MiB"
            )

    async def _server_errors(self) -> float:
        """Returns the number of errors of the server's own that it has counted."""
        port = self._server.port
        request = f"GET /metrics HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\n\r\n"
        async with asyncio.timeout(PATIENCE):
            _, body = await exchange(port, request.encode())
        return sum(
            float(line.rpartition(" ")[2])
            for line in body.decode().splitlines()
            if line.startswith("gshard_errors_total{") and 'status="500"' in line
        )
