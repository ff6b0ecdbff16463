"""WaitingTexts: the texts that wait for a place, shared by the workers of an engine."""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from lingvo_gshard.wings.inference import requests
from lingvo_gshard.wings.inference.decoding.state import BEAM_RECORD, SearchKind

# Hypotheses with this rank or a lower rank do not exist.
_IMPOSSIBLE = -1e8


class DecodedText:
    """One text of a request, in one row of a batch.

    Attributes:
      text: number of the text within its request.
      limit: the largest number of new tokens.
      generated: the number of new tokens so far.
      passes: how often other texts got a place that this text waited for.
      created: when the text began to wait, in the time of time.monotonic.
    """

    def __init__(self, answer: requests.Answer, text: int, limit: int, end_ids: Sequence[int]):
        self.answer, self.text, self.limit = answer, text, limit
        self._end_ids = end_ids
        self.generated, self.is_done, self.passes = 0, False, 0
        self.created = time.monotonic()

    @property
    def position(self) -> int:
        """Positions that the model has computed: given tokens and new ones, without the last."""
        return len(self.answer.request.given) - 1 + self.generated

    def add(self, records: dict[str, np.ndarray], is_active: bool) -> None:
        """Adds what the model chose in some steps, name -> [steps,W]."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Ends the text where it is."""
        self.is_done = True

    def hypotheses(self) -> list[requests.Hypothesis]:
        """Returns the texts, the best first."""
        raise NotImplementedError


class SampledText(DecodedText):
    """A text that is drawn, or decoded greedily."""

    def __init__(self, answer: requests.Answer, text: int, limit: int, end_ids: Sequence[int]):
        super().__init__(answer, text, limit, end_ids)
        self._reason = requests.LENGTH
        self._tokens: list[int] = []
        self._log_probabilities: list[float] = []

    def add(self, records: dict[str, np.ndarray], is_active: bool) -> None:
        tokens = records["token_BW"][:, 0].tolist()
        log_probabilities = records["log_probability_BW"][:, 0].tolist()
        self.generated += len(tokens)
        self.is_done = not is_active
        request = self.answer.request
        before = len(self._tokens)
        # One by one: how many tokens a call makes depends on other texts, and the text does not.
        for token, log_probability in zip(tokens, log_probabilities, strict=True):
            self._tokens.append(token)
            self._log_probabilities.append(log_probability)
            if token in self._end_ids:
                self._reason = requests.END
            elif request.should_stop and request.should_stop(self._tokens):
                self._reason, self.is_done = requests.STOP, True
                break
        if request.streams and len(self._tokens) > before:
            new = tuple(self._tokens[before:]), tuple(self._log_probabilities[before:])
            self.answer.put(requests.NewTokens(self.text, *new))
        if self.answer.is_canceled and not self.is_done:
            self.cancel()

    def cancel(self) -> None:
        super().cancel()
        self._reason = requests.CANCELED

    def hypotheses(self) -> list[requests.Hypothesis]:
        has_end = self._reason == requests.END
        tokens = self._tokens[:-1] if has_end else self._tokens
        log_probabilities = tuple(self._log_probabilities)
        score = float(sum(log_probabilities))
        end = self._tokens[-1] if has_end else None
        return [requests.Hypothesis(tuple(tokens), log_probabilities, score, self._reason, end)]


class BeamText(DecodedText):
    """A text that is searched for with a beam."""

    def __init__(self, answer: requests.Answer, text: int, limit: int, end_ids: Sequence[int]):
        super().__init__(answer, text, limit, end_ids)
        self._records: dict[str, list[np.ndarray]] = {name: [] for name in BEAM_RECORD}

    def add(self, records: dict[str, np.ndarray], is_active: bool) -> None:
        for name, values in records.items():
            # A copy: the next call of a program may reuse the memory.
            self._records[name].append(np.array(values))
        self.generated += len(records["token_BW"])
        self.is_done = not is_active or self.answer.is_canceled

    def hypotheses(self) -> list[requests.Hypothesis]:
        if not self.generated:
            return []
        found = {name: np.concatenate(parts) for name, parts in self._records.items()}
        ranked = [
            (float(ranks[tuple(place)]), kind, *map(int, place))
            for kind, ranks in (
                (requests.END, found["end_BWe"]),
                (requests.LENGTH, found["last_BW"]),
            )
            for place in np.argwhere(ranks > _IMPOSSIBLE)
        ]
        ranked.sort(key=lambda entry: (-entry[0], entry[2]))
        wanted = self.answer.request.options.best
        return [self._hypothesis(found, *entry) for entry in ranked[:wanted]]

    def _hypothesis(
        self, found: dict[str, np.ndarray], rank: float, kind: str, step: int, w: int, e: int = 0
    ) -> requests.Hypothesis:
        """Returns a hypothesis of the beam before (END, with an id e) or after (LENGTH) a step."""
        tokens, gains, end = [], [], None
        if kind == requests.END:
            gains.append(float(found["end_log_probability_BWe"][step, w, e]))
            end, step = self._end_ids[e], step - 1
        while step >= 0:
            tokens.append(int(found["token_BW"][step, w]))
            gains.append(float(found["log_probability_BW"][step, w]))
            step, w = step - 1, int(found["parent_BW"][step, w])
        return requests.Hypothesis(tuple(tokens[::-1]), tuple(gains[::-1]), rank, kind, end)


# By the identity of the row: removing one takes the same time wherever it is.
_Group = OrderedDict[int, DecodedText]


class Turns:
    """Texts of one kind of search that wait.

    Clients are served in turn, and so are the groups of one client, which are the texts that it has
    sent together. The texts of a group stay in order.
    """

    def __init__(self):
        self._clients: OrderedDict[str, OrderedDict[int, _Group]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_shared(self) -> bool:
        """Whether texts of several clients or groups wait."""
        return len(self._clients) > 1 or any(len(g) > 1 for g in self._clients.values())

    def add(self, row: DecodedText) -> None:
        """Adds a text at the end of its group."""
        request = row.answer.request
        groups = self._clients.setdefault(request.client, OrderedDict())
        groups.setdefault(request.group, OrderedDict())[id(row)] = row
        self._count += 1

    def first(self, most: int) -> list[DecodedText]:
        """Returns the next texts, which go on waiting."""
        clients = (
            _in_turn(group.values() for group in groups.values())
            for groups in self._clients.values()
        )
        return list(itertools.islice(_in_turn(clients), most))

    def remove(self, row: DecodedText, is_served: bool = False) -> None:
        """Removes a text. If it is served, the turn of its client comes after all others."""
        client, number = row.answer.request.client, row.answer.request.group
        groups = self._clients[client]
        del groups[number][id(row)]
        self._count -= 1
        if not groups[number]:
            del groups[number]
        elif is_served:
            groups.move_to_end(number)
        if not groups:
            del self._clients[client]
        elif is_served:
            self._clients.move_to_end(client)


def _in_turn(sequences: Iterable[Iterable[DecodedText]]) -> Iterator[DecodedText]:
    """Yields the first of each sequence, then the second of each, and so on."""
    left = deque(map(iter, sequences))
    while left:
        current = left.popleft()
        for row in current:
            yield row
            left.append(current)
            break


# The texts to take are chosen among this many next texts.
_WINDOW = 512


class WaitingTexts:
    """The waiting texts of each kind of search.

    Attributes:
      workers: the number of workers that share it.
      is_stopped: whether workers stop after their current call, whatever waits.
      version: changes when there may be something to do for a worker that found nothing.
    """

    def __init__(self):
        self.workers, self.version = 1, 0
        self._turns: dict[SearchKind, Turns] = {}
        self._of_answer: dict[requests.Answer, list[DecodedText]] = {}
        self._under_way: collections.Counter[SearchKind] = collections.Counter()
        self._changed = threading.Condition()
        self._is_closed = False
        self.is_stopped = False

    def put(self, rows: Sequence[DecodedText]) -> None:
        """Adds texts at the end. Raises ValueError if the engine is closed."""
        with self._changed:
            if self._is_closed:
                raise ValueError("the engine is closed")
            for row in rows:
                self._turns.setdefault(_kind(row), Turns()).add(row)
                self._of_answer.setdefault(row.answer, []).append(row)
            self.wake()

    def close(self) -> None:
        """Takes no more texts; workers stop when none waits."""
        with self._changed:
            self._is_closed = True
            self.wake()

    def stop(self) -> None:
        """Takes no more texts and gives up the waiting texts."""
        with self._changed:
            self._is_closed = self.is_stopped = True
            self._turns.clear()
            self._of_answer.clear()
            self.wake()

    def cancel(self, answer: requests.Answer) -> None:
        """Ends the waiting texts of an answer; those that are decoded are not here."""
        with self._changed:
            rows = self._of_answer.pop(answer, [])
            for row in rows:
                self._turns[_kind(row)].remove(row)
            self.wake()
        for row in rows:
            answer.complete(row.text, ())

    def wake(self) -> None:
        """Has idle workers look for something to do."""
        with self._changed:
            self.version += 1
            self._changed.notify_all()

    def wait(self, version: int, seconds: float | None) -> None:
        """Waits until the version changes, when there may be something new to do."""
        with self._changed:
            self._changed.wait_for(lambda: self.version != version, seconds)

    def count(self, kind: SearchKind) -> int:
        """Returns the number of texts of a kind that wait."""
        return len(self._turns.get(kind, ()))

    def share(self, kind: SearchKind) -> int:
        """Returns the number of texts of a kind that each worker has if all are divided evenly."""
        with self._changed:
            texts = self.count(kind) + self._under_way[kind]
            return -(-texts // self.workers)

    def finish(self, kind: SearchKind, texts: int) -> None:
        """Forgets texts that a worker has taken before."""
        with self._changed:
            self._under_way[kind] -= texts

    @property
    def total(self) -> int:
        """The number of texts of all kinds that wait."""
        with self._changed:
            return sum(map(len, self._turns.values()))

    @property
    def is_over(self) -> bool:
        """Whether no texts wait, and none will come."""
        return self._is_closed and not self.total

    def take(
        self, kind: SearchKind, choose: Callable[[list[DecodedText], bool], list[DecodedText]]
    ) -> list[DecodedText]:
        """Returns texts of a kind, which wait no longer.

        Args:
          kind: how tokens are chosen.
          choose: selects the texts to take among the next texts. The second argument says whether
            the texts are of several clients, or of several groups of one client. Other threads wait
            for this call.
        """
        with self._changed:
            turns = self._turns.get(kind)
            if not turns:
                return []
            window = turns.first(_WINDOW)
            taken = choose(window, turns.is_shared)
            chosen = set(map(id, taken))
            for row in window:
                if id(row) not in chosen:
                    row.passes += bool(taken)
                    continue
                turns.remove(row, is_served=True)
                rows = self._of_answer[row.answer]
                rows.remove(row)
                if not rows:
                    del self._of_answer[row.answer]
            self._under_way[kind] += len(taken)
            return taken

    def kinds(self) -> list[SearchKind]:
        """Returns the kinds with waiting texts."""
        with self._changed:
            return [kind for kind, turns in self._turns.items() if turns]


def _kind(row: DecodedText) -> SearchKind:
    return row.answer.request.options.kind
