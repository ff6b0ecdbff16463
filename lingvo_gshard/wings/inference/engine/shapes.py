"""ShapeSelector: which shape of a batch holds some texts, and which programs that takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from lingvo_gshard.wings.inference.decoding.state import SearchKind, StateShape
from lingvo_gshard.wings.inference.engine.decode_batch import Admission, DecodeBatch
from lingvo_gshard.wings.inference.engine.waiting import DecodedText, WaitingTexts
from lingvo_gshard.wings.inference.model_facts import ModelFacts
from lingvo_gshard.wings.inference.programs.executables import ADMIT, STEPS, Executables, ProgramKey

# A part of a decode batch has as few of these rows as its texts need: each size is a program.
ROWS = (1, 8, 16, 32)
# Sizes of a state, in positions. Given texts have these sizes, too, if few programs are wanted.
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Sizes, in tokens, of the sources and of the given texts that enter a state together.
FINE_LENGTHS = (8, 16, 24, *(n for length in LENGTHS for n in (length, length * 3 // 2)))
# New texts enter when this share of the rows is free, or when all that wait can enter.
FREE_SHARE = 4


def fitting(sizes: Sequence[int], wanted: int, most: int | None = None) -> int:
    """Returns the smallest of ascending sizes that is enough, or the largest one up to `most`."""
    found = next((size for size in sizes if size >= wanted), sizes[-1])
    return found if most is None else min(found, most)


def program_keys(kind: SearchKind, shape: StateShape, parts: int) -> list[ProgramKey]:
    """Returns the keys of the programs that texts without given tokens need in a shape."""
    texts = admission_size(shape.rows, parts)
    admit = ProgramKey(ADMIT, kind, shape, texts, source=shape.memory_length)
    return [ProgramKey(STEPS, kind, shape), admit]


def admission_size(rows: int, parts: int) -> int:
    """Returns the number of texts that enter a state together, of rows in so many parts."""
    return max(rows // FREE_SHARE, parts)


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Options for the use that an engine makes of its machine.

    Attributes:
      workers: threads that decode side by side; 0: one for each core of a CPU, else one.
      rows: the largest number of texts of one part of a batch.
      hypotheses: the largest number of hypotheses of one part of a batch.
      exact: whether to compile a program of the size that fits best where a larger one is ready.
        That takes seconds for each size, and pays for long jobs.
    """

    workers: int = 0
    rows: int = 32
    hypotheses: int = 128
    exact: bool = False

    def most_texts(self, beam: int) -> int:
        """Returns the largest number of texts of one part, each with `beam` hypotheses."""
        return max(min(self.rows, self.hypotheses // beam), 1)


# With this many waiting texts a smaller shape pays for compiling its programs.
_MANY = 4096
# Number of times that other texts may get a place that a text waits for.
_MOST_PASSES = 16

_IsUsable = Callable[[ProgramKey], bool]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The next shape of a batch, and the texts that enter it."""

    shape: StateShape
    admissions: tuple[Admission, ...] = ()

    def keys(self, kind: SearchKind) -> list[ProgramKey]:
        """Returns the keys of the programs that the plan needs."""
        return [ProgramKey(STEPS, kind, self.shape), *(one.key for one in self.admissions)]


class ShapeSelector:
    """Chooses shapes for texts.

    If a program is not loaded, Placement asks the threads that load and compile for the program.
    Meanwhile texts are decoded with larger shapes, or wait.
    """

    def __init__(
        self,
        facts: ModelFacts,
        executables: Executables,
        waiting: WaitingTexts,
        options: EngineOptions,
    ):
        self._facts, self._executables = facts, executables
        self._waiting, self._options = waiting, options
        # In ascending order.
        self._row_counts = [rows * executables.parts for rows in ROWS]
        self._shapes = [
            StateShape(rows, length, min(length, facts.most_source))
            for rows in self._row_counts
            for length in LENGTHS
        ]

    def usable(
        self, batch: DecodeBatch, entering: Sequence[DecodedText] = (), wants: bool = True
    ) -> Plan | None:
        """Returns how texts can enter a batch; None if that takes programs that are not loaded.

        Programs that would suit better are made if `wants`.
        """
        best = self.best(batch, entering)
        keys = best.keys(batch.kind)
        if all(map(self._executables.is_loaded, keys)):
            return best
        if wants:
            self._executables.want(keys)
        if self.is_exact(batch.kind):
            return None
        texts = [*batch.texts, *entering]
        needed = self._needed(texts, len(texts))
        is_loaded = self._executables.is_loaded
        for shape in self._shapes:
            if shape.holds(needed) and is_loaded(ProgramKey(STEPS, batch.kind, shape)):
                plan = self._plan(batch, shape, entering, is_loaded)
                if all(map(is_loaded, plan.keys(batch.kind))):
                    return plan
        return None

    def best(self, batch: DecodeBatch, entering: Sequence[DecodedText] = ()) -> Plan:
        """Returns how texts enter a batch if only the time of compiling counts.

        A shape with compiled programs is preferred to a smaller one without.
        """
        texts = [*batch.texts, *entering]
        rows = min(max(len(texts), self._waiting.share(batch.kind)), self.largest(batch.kind))
        shape, is_ready = self._needed(texts, rows), self._executables.is_ready
        if not self.is_exact(batch.kind):
            larger = (one for one in self._shapes if one.holds(shape))
            parts = self._executables.parts
            ready = (x for x in larger if all(map(is_ready, program_keys(batch.kind, x, parts))))
            shape = next(ready, shape)
        return self._plan(batch, shape, entering, is_ready)

    def suiting(
        self, rows: Sequence[DecodedText], most: int, wanted: int, is_shared: bool
    ) -> list[DecodedText]:
        """Returns the texts whose sizes suit best: a batch costs what its longest text costs.

        If other texts got places too often while one text waited, the waiting text counts as the
        first text and is returned in any case.

        Args:
          rows: the texts, in the order of their turns.
          wanted: the size that suits; 0 for the size of the first text.
          is_shared: whether the texts are of several clients. The first text is then returned in
            any case.
        """
        if not rows:
            return []
        latest = max(rows, key=lambda row: row.passes)
        is_late = latest.passes >= _MOST_PASSES
        first = latest if is_late else rows[0]
        suitable = self.size(first) if is_late or not wanted else wanted
        must = is_shared or is_late

        def distance(row: DecodedText) -> tuple[bool, float]:
            return not (must and row is first), abs(math.log2(self.size(row) / suitable))

        # Sorting is stable: texts of the same size stay in the order of their turns.
        return sorted(rows, key=distance)[:most]

    def like(self, row: DecodedText) -> tuple[int, int]:
        """Returns what texts have in common that need the same programs to enter alone."""
        given = len(row.answer.request.given) - 1
        return self.size(row), fitting(LENGTHS, given) if given else 0

    def largest(self, kind: SearchKind) -> int:
        """Returns the largest number of rows of a batch."""
        most = self._options.most_texts(kind.beam) * self._executables.parts
        fitting = (n for n in self._row_counts if n <= most)
        return max(fitting, default=self._row_counts[0])

    def size(self, row: DecodedText) -> int:
        """Returns the length of a state that holds a text.

        Source and target share a size, so that there are few shapes.
        """
        wanted = max(self._positions(row), len(row.answer.request.source))
        return fitting(LENGTHS, wanted)

    def _positions(self, row: DecodedText) -> int:
        """Returns the positions that a text probably needs: those so far and some more."""
        given, source = len(row.answer.request.given), len(row.answer.request.source)
        likely = source + source // 4 + 4 if source else row.limit
        return max(given + min(row.limit, likely), row.position + 1)

    def _needed(self, texts: Sequence[DecodedText], rows: int) -> StateShape:
        """Returns the smallest shape that holds texts and a number of rows."""
        length = max(map(self.size, texts))
        rows = fitting(self._row_counts, rows)
        return StateShape(rows, length, min(length, self._facts.most_source))

    def is_exact(self, kind: SearchKind) -> bool:
        """Returns whether to compile the programs that fit best where larger ones are ready."""
        return self._options.exact or self._waiting.count(kind) >= _MANY

    def _plan(
        self,
        batch: DecodeBatch,
        shape: StateShape,
        entering: Sequence[DecodedText],
        is_usable: _IsUsable,
    ) -> Plan:
        """Returns the plan for a shape; of programs for longer sources, a usable one is taken."""
        exact = self.is_exact(batch.kind)
        few = admission_size(shape.rows, self._executables.parts)
        # Most of a batch in one call, whose products are larger: its padding costs less than calls.
        fills_batch = exact and 2 * len(entering) > shape.rows
        texts = shape.rows if fills_batch else few
        admissions = []
        for first in range(0, len(entering), texts):
            rows = tuple(entering[first : first + texts])
            keys = self._admission_keys(batch.kind, shape, rows, texts, exact)
            key = keys[0] if exact else next(filter(is_usable, keys), keys[-1])
            admissions.append(Admission(rows, key))
        return Plan(shape, tuple(admissions))

    def _admission_keys(
        self,
        kind: SearchKind,
        shape: StateShape,
        rows: Sequence[DecodedText],
        texts: int,
        exact: bool,
    ) -> list[ProgramKey]:
        """Returns the programs that let texts enter: for short sources first, for all last."""
        given = max(len(row.answer.request.given) - 1 for row in rows)
        sizes = FINE_LENGTHS if exact else LENGTHS
        most = min(shape.length, self._facts.most_positions)
        given = fitting(sizes, given, most) if given else 0
        source = max(len(row.answer.request.source) for row in rows)
        most = shape.memory_length
        needed = fitting(FINE_LENGTHS, source, most)
        lengths = sorted({n for n in FINE_LENGTHS if needed <= n < most} | {most})
        return [ProgramKey(ADMIT, kind, shape, texts, given, length) for length in lengths]
