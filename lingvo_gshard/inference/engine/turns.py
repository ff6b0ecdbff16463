"""Turns: waiting texts, taken from their clients in turn."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

from lingvo_gshard.inference.engine.row import Row

# By the identity of the row: removing one takes the same time wherever it is.
_Group = OrderedDict[int, Row]


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

    def add(self, row: Row) -> None:
        """Adds a text at the end of its group."""
        request = row.answer.request
        groups = self._clients.setdefault(request.client, OrderedDict())
        groups.setdefault(request.group, OrderedDict())[id(row)] = row
        self._count += 1

    def first(self, most: int) -> list[Row]:
        """Returns the next texts, which go on waiting."""
        clients = (
            _in_turn(group.values() for group in groups.values())
            for groups in self._clients.values()
        )
        return list(itertools.islice(_in_turn(clients), most))

    def remove(self, row: Row, is_served: bool = False) -> None:
        """Removes a text.

        Args:
          row: the text.
          is_served: whether it gets a place. The turn of its client then comes after all others.
        """
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


def _in_turn(sequences: Iterable[Iterable[Row]]) -> Iterator[Row]:
    """Yields the first of each sequence, then the second of each, and so on."""
    left = deque(map(iter, sequences))
    while left:
        current = left.popleft()
        for row in current:
            yield row
            left.append(current)
            break
