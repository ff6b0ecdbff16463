"""Records of watched routers: rows of <logdir>/routers.jsonl, one per watched step and layer."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from lingvo_gshard.core import Params, atomic, objects, regular
from lingvo_gshard.layers import MixtureOfExperts

# Name of the file in the run's directory.
ROUTERS_FILE = "routers.jsonl"
# Languages or classes whose counts a record leaves out are summed under this name.
OTHERS = "others"


class RouterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record of one layer's router in one step, with E experts.

    A choice is a token's request for an expert. Counts are exact integers over the whole batch, of
    all devices. Entropies are in nats.

    Attributes:
      step: number of the step, from 1.
      layer: path of the layer, such as `encoder.layers[1].feed_forward`.
      experts_per_token: experts of a token by the router's Params; the mean if tokens differ.
      tokens: real tokens that the layer got.
      choices: [E], choices of each expert before capacity. If experts choose tokens, the tokens
        that each chose.
      kept: [E], tokens that each expert computed.
      dropped_share: share of the choices that found their expert full. If experts choose tokens,
        share of the tokens that no expert chose.
      load_entropy: entropy of the experts' shares of the choices; ln E is an even load.
      token_entropy: mean over tokens of the entropy of a token's probabilities; None for a router
        without probabilities.
      balance_loss: the load-balancing loss without its weight; None for a router without one.
      balance_floor: the value of this loss under an even load.
      dead_since: experts without a token in all watched steps of the window -> the first watched
        step since which they have had none.
      groups: number of groups of tokens that were routed by themselves; 0 in records of earlier
        versions, which lack the next four attributes, too.
      group_size: tokens of a group, padding included.
      capacity: slots that an expert has for each group.
      positions: the requests for each position of the experts' buffers, of all groups and experts,
        up to the last one that is asked for. Requests from position `capacity` on are dropped.
        Empty if experts choose tokens.
      by_part: [parts][E], choices by the tokens of each of several equal parts of the groups, in
        the order of the batch's rows.
      by_language: language -> [E], choices by tokens of examples in this language. Empty if the
        input does not tell languages.
      by_class: class of a token -> [E], choices by tokens of this class. Empty if the input has no
        vocabulary.
    """

    step: int
    layer: str
    router: str
    experts_per_token: float
    tokens: int
    choices: list[int]
    kept: list[int]
    dropped_share: float
    load_entropy: float
    token_entropy: float | None = None
    balance_loss: float | None = None
    balance_floor: float | None = None
    dead_since: dict[int, int] = {}
    groups: int = 0
    group_size: int = 0
    capacity: int = 0
    positions: list[int] = []
    by_part: list[list[int]] = []
    by_language: dict[str, list[int]] = {}
    by_class: dict[str, list[int]] = {}

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.choices)

    @property
    def load(self) -> np.ndarray:
        """[E], each expert's share of the choices; zeros if there was no choice."""
        choices = np.asarray(self.choices, np.float64)
        return choices / max(choices.sum(), 1.0)

    @property
    def busiest(self) -> tuple[int, float]:
        """The expert with the most choices, and its share of them."""
        load = self.load
        return int(load.argmax()), float(load.max())

    @property
    def balance_distance(self) -> float | None:
        """The balance loss over its value under an even load, minus 1; None without a loss."""
        if self.balance_loss is None or not self.balance_floor:
            return None
        return self.balance_loss / self.balance_floor - 1.0


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(RouterRecord)


def routers_of_run(logdir: str | os.PathLike) -> list[RouterRecord]:
    """Returns the undamaged records of a run by step; none if its routers were not watched."""
    path = pathlib.Path(logdir) / ROUTERS_FILE
    return [record for _, record in _rows(path)]


class RecordsFile:
    """Appends records to <logdir>/routers.jsonl. While the disk is full, they wait in memory.

    Attributes:
      earlier: the records that the file already had, up to the step that the run resumes from.
    """

    def __init__(self, logdir: pathlib.Path, step: int, say: Callable[[str], None]):
        """Opens a run's file. Records after the step that the run resumes from are removed."""
        self._path, self._say = logdir / ROUTERS_FILE, say
        self._unwritten, self._warned = b"", False
        kept = [(line, record) for line, record in _rows(self._path) if record.step <= step]
        self.earlier = [record for _, record in kept]
        content = b"".join(line for line, _ in kept)
        if self._path.exists() and objects.read_bytes(self._path) != content:
            atomic.replace_file(self._path, content)

    def append(self, records: Sequence[RouterRecord]) -> None:
        """Appends records to the file, after records that still wait in memory."""
        self._unwritten += b"".join(_ENCODER.encode(record) + b"\n" for record in records)
        try:
            file = regular.open_to_append(self._path)
            try:
                while self._unwritten:
                    self._unwritten = self._unwritten[os.write(file, self._unwritten) :]
            finally:
                os.close(file)
            self._warned = False
        except OSError as error:
            if not self._warned:
                self._say(
                    f"Warning: {ROUTERS_FILE} cannot be written ({error.strerror}); new records "
                    "wait in memory"
                )
            self._warned = True


def _rows(path: pathlib.Path) -> Iterator[tuple[bytes, RouterRecord]]:
    """Yields each complete row of a file with its record."""
    try:
        content = objects.read_bytes(path)
    except OSError:
        return
    for line in content.splitlines(keepends=True):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            if line.endswith(b"\n"):
                yield line, _DECODER.decode(line)


_MOST_WARNINGS = 20
_MOST_EXPERTS = 8
_ADVICE = (
    "try a z_loss_weight that keeps its logits small, a router with a selection bias "
    "(SigmoidRouter), or fewer experts"
)


@dataclasses.dataclass
class _State:
    """The history of one layer.

    Attributes:
      idle_since: expert -> the watched step that began its present time without tokens.
      idle_steps: expert -> the number of watched steps in its present time without tokens.
      told: experts that were reported as dead.
      collapsed_since: the watched step that began the router's present collapse; None if the router
        is not collapsed.
    """

    idle_since: dict[int, int] = dataclasses.field(default_factory=dict)
    idle_steps: dict[int, int] = dataclasses.field(default_factory=dict)
    told: set[int] = dataclasses.field(default_factory=set)
    collapsed_since: int | None = None


class Verdicts:
    """Judges the records of a run, in the order of steps."""

    def __init__(self, params: Params, layers: Mapping[str, MixtureOfExperts]):
        """Begins with nothing known; `params` is `run.routers`."""
        self._p, self._layers = params, layers
        self._states: dict[str, _State] = {}
        self._warnings = 0
        self._advised: set[str] = set()

    def add(self, record: RouterRecord) -> tuple[RouterRecord, list[str]]:
        """Returns the record with its dead experts, and lines to show."""
        state = self._states.setdefault(record.layer, _State())
        idle = [expert for expert, count in enumerate(record.kept) if not count]
        state.idle_since = {e: state.idle_since.get(e, record.step) for e in idle}
        state.idle_steps = {e: state.idle_steps.get(e, 0) + 1 for e in idle}
        dead = {e: s for e, s in state.idle_since.items() if state.idle_steps[e] >= self._p.window}
        lines = [*self._collapse(state, record), *self._deaths(state, record, dead)]
        return msgspec.structs.replace(record, dead_since=dead), lines

    def summary(self) -> list[str]:
        """Returns a line for each router that is collapsed or has dead experts at the end."""
        lines = []
        for layer, state in self._states.items():
            dead = [e for e, count in state.idle_steps.items() if count >= self._p.window]
            if state.collapsed_since is not None:
                lines.append(f"  {layer}  collapsed since step {state.collapsed_since:,}")
            if dead:
                since = min(state.idle_since[e] for e in dead)
                lines.append(f"  {layer}  dead {_experts(dead)}, the longest since step {since:,}")
        return ["Routers at the end:", *lines] if lines else []

    def _collapse(self, state: _State, record: RouterRecord) -> list[str]:
        if concentration(record) <= self._p.collapse:
            before, state.collapsed_since = state.collapsed_since, None
            if before is None:
                return []
            return self._told(
                f"step {record.step:,}: the router of {record.layer} is no longer collapsed, as it "
                f"was since step {before:,}"
            )
        if state.collapsed_since is not None:
            return []
        state.collapsed_since = record.step
        expert, share = record.busiest
        line = (
            f"Warning: step {record.step:,}: the router of {record.layer} has collapsed: expert "
            f"{expert} gets {share:.1%} of the choices; an even share is "
            f"{1 / record.num_experts:.1%}"
        )
        return self._told(line, record.layer)

    def _deaths(self, state: _State, record: RouterRecord, dead: dict[int, int]) -> list[str]:
        new = sorted(set(dead) - state.told)
        state.told = set(dead)
        lines = []
        for since in sorted({dead[e] for e in new}):
            experts = [e for e in new if dead[e] == since]
            has = "has" if len(experts) == 1 else "have"
            line = (
                f"Warning: step {record.step:,}: {record.layer}: {_experts(experts)} {has} had no "
                f"token since step {since:,}, in {state.idle_steps[experts[0]]} watched steps"
            )
            lines += self._told(line, record.layer)
        return lines

    def _told(self, line: str, layer: str | None = None) -> list[str]:
        """Returns the line, and advice after the first warning about a layer."""
        self._warnings += 1
        if self._warnings > _MOST_WARNINGS:
            return []
        if layer is None or layer in self._advised:
            return [line]
        self._advised.add(layer)
        return [line, f"{layer}: {self._advice(self._layers[layer])}"]

    def _advice(self, layer: MixtureOfExperts) -> str:
        router = layer.router
        name = type(router).__name__
        if not router.is_learned:
            return f"{name} learns nothing: loads follow the data. Choose a learned router"
        if "auxiliary_loss_weight" not in router.p:
            return f"{name} has no load-balancing loss; {_ADVICE}"
        weight = router.p.auxiliary_loss_weight
        return (
            f"the auxiliary_loss_weight of its {name} is {weight:g}; try a larger one. Otherwise "
            f"{_ADVICE}"
        )


def concentration(record: RouterRecord) -> float:
    """Returns how far the busiest experts are above an even load, as a share of what is possible.

    0 is an even load. 1 means that all tokens have the same k experts, k per token.
    """
    k = max(round(record.experts_per_token), 1)
    even = k / record.num_experts
    if even >= 1:
        return 0.0
    busiest = float(np.sort(record.load)[-k:].sum())
    return (busiest - even) / (1.0 - even)


def _experts(experts: Sequence[int]) -> str:
    """Returns experts in words, such as `experts 1, 5 and 7`."""
    shown = [str(e) for e in experts[:_MOST_EXPERTS]]
    more = len(experts) - len(shown)
    if more:
        shown.append(f"{more} more")
    if len(shown) == 1:
        return f"expert {shown[0]}"
    return f"experts {', '.join(shown[:-1])} and {shown[-1]}"
