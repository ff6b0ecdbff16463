"""Quotes: passages of pages with figures of plans, and what today's plans say instead."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
import shlex
import string
import tempfile
import tomllib
from collections.abc import Iterator, Mapping

import msgspec

from lingvo_gshard.tools import plan
from lingvo_gshard.wings.planning.machines import topologies

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_QUOTES = pathlib.Path(__file__).parent / "quotes.toml"


class Bytes(msgspec.Struct, frozen=True):
    """Bytes of one device.

    Attributes:
      peak: the most that a step needs.
      host: what stands in the memory of the host.
    """

    peak: int
    host: int


class Transfer(msgspec.Struct, frozen=True):
    """A collective, or copies between a device and its host: `seconds` that the step waits."""

    seconds: float


class Planned(msgspec.Struct, frozen=True):
    """What is quoted of a plan, from the record that `gshard-plan --json` writes."""

    seconds_per_step: float
    tokens_per_second: float
    mfu: float
    bytes_per_device: Bytes
    collectives: list[Transfer]
    host_transfers: list[Transfer]

    @property
    def waiting(self) -> float:
        """The part of a step that waits for collectives."""
        return sum(each.seconds for each in self.collectives) / self.seconds_per_step

    @property
    def exposed(self) -> float:
        """Seconds that a step waits for copies to and from the host."""
        return sum(each.seconds for each in self.host_transfers)

    @property
    def ms(self) -> float:
        """Milliseconds of a step."""
        return 1e3 * self.seconds_per_step

    @property
    def speed(self) -> float:
        """Steps per second."""
        return 1 / self.seconds_per_step

    @property
    def gib(self) -> float:
        """The peak of one device in GiB."""
        return self.bytes_per_device.peak / 2**30

    @property
    def host_gib(self) -> float:
        """What stands in the memory of the host for one device, in GiB."""
        return self.bytes_per_device.host / 2**30


class Generation(msgspec.Struct, frozen=True):
    """What is quoted of a plan of generation: a call that decodes `steps` tokens, and a prefill."""

    steps: int
    step: Planned
    prefill: Planned

    @property
    def token_ms(self) -> float:
        """Milliseconds between two tokens of a text."""
        return self.step.ms / self.steps


class Quote(msgspec.Struct, frozen=True):
    """A passage of a page.

    Attributes:
      page: name of the page.
      text: the passage. Braces contain a plan's name and an attribute of `Planned`
        or `Generation`.
      plans: name of a plan -> arguments of gshard-plan.
    """

    page: str
    text: str
    plans: Mapping[str, str]

    @property
    def topologies(self) -> set[str]:
        """The machines that are planned."""
        words = [word for command in self.plans.values() for word in shlex.split(command)]
        return {word.partition("=")[2] for word in words if word.startswith("--topology=")}

    @property
    def missing(self) -> list[str]:
        """The machines whose own compiler is not installed here."""
        return sorted(n for n in self.topologies if topologies.get(n).compiler == "cpu")

    def now(self) -> str:
        """Returns the passage with the figures of today's plans."""
        planned = {name: _plan(command) for name, command in self.plans.items()}
        return _words(self.text.format(**planned))

    @property
    def stands_on_page(self) -> bool:
        """Whether the page contains the passage with any figures."""
        parts = re.split(r"{[^}]*}", _words(self.text))
        pattern = r"[\d.,]+%?".join(map(re.escape, parts))
        return re.search(pattern, self._words_of_page) is not None

    def is_on_page(self, text: str) -> bool:
        """Returns whether the page contains a text, however its lines are broken."""
        return _words(text) in self._words_of_page

    @property
    def _words_of_page(self) -> str:
        return _words((_ROOT / "docs" / self.page).read_text(encoding="utf-8"))


def load() -> Iterator[Quote]:
    """Yields all quotes. `$name` in a command stands for the words of that name."""
    data = tomllib.loads(_QUOTES.read_text(encoding="utf-8"))
    for entry in data["quotes"]:
        quote = msgspec.convert(entry, Quote)
        commands = {}
        for name, command in quote.plans.items():
            while "$" in command:
                command = string.Template(command).substitute(data["words"])
            commands[name] = command
        yield msgspec.structs.replace(quote, plans=commands)


def _plan(command: str) -> Planned | Generation:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(_ROOT):
        path = pathlib.Path(folder) / "plan.json"
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = plan.main([plan.NAME, *shlex.split(command), f"--json={path}"])
        if code:
            raise RuntimeError(f"gshard-plan {command}\n{printed.getvalue()}")
        kind = Generation if "--generate" in command else Planned
        return msgspec.json.decode(path.read_bytes(), type=kind)


def _words(text: str) -> str:
    return " ".join(text.split())
