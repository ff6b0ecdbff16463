"""The result of a verification: what was compared, and the first tensor that differs."""

from __future__ import annotations

import msgspec

from lingvo_gshard.runtime.verification.annotations import Annotation
from lingvo_gshard.runtime.verification.comparison import Difference

# In the order in which a step computes them.
KINDS = (
    "output",
    "loss",
    "metric",
    "gradient",
    "new weight",
    "average",
    "counter",
    "outer weight",
    "result",
)


class Compared(msgspec.Struct, frozen=True):
    """A tensor that was computed partitioned and whole.

    Attributes:
      kind: one of KINDS.
      name: the tensor: path of a layer or weight, or the name of a metric.
      difference: how the two results differ.
      is_equal: whether they are equal within the tolerance.
    """

    kind: str
    name: str
    difference: Difference
    is_equal: bool


class NearCollective(msgspec.Struct, frozen=True):
    """A collective that the partitioner compiled for the layer of a tensor.

    Attributes:
      kind: such as "all-reduce".
      axes: mesh axes along which it communicates.
      bytes: bytes of its operand or result on one device.
      op_name: the operation that it was compiled for.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    op_name: str

    def __str__(self) -> str:
        axes = ", ".join(self.axes) or "all devices"
        return f"{self.kind} over {axes} of {self.bytes:,} bytes, for {self.op_name}"


class Finding(msgspec.Struct, frozen=True):
    """The first tensor that differs, with what is near it.

    Attributes:
      kind: one of KINDS.
      name: the tensor.
      layer: path of the layer that computes it; empty at the root.
      difference: how it differs.
      likely: the likely cause, in a sentence; empty if nothing points to one.
      annotation: the nearest annotation or manual region.
      collectives: the collectives of the layer in the tensor's phase.
      source: the line that computes it; empty if it is unknown.
      axes: groups of mesh axes, one of which the difference comes from; empty if nothing is known.
    """

    kind: str
    name: str
    layer: str
    difference: Difference
    likely: str
    annotation: Annotation | None
    collectives: tuple[NearCollective, ...]
    source: str = ""
    axes: tuple[tuple[str, ...], ...] = ()

    def caused_by_dropout(self) -> Finding:
        """Returns the finding of a difference that disappears without dropout."""
        likely = (
            "without dropout all is equal: dropout's random numbers differ. A manual region must "
            "draw the mask of the whole tensor and pass it in, or draw it outside"
        )
        return msgspec.structs.replace(self, likely=likely)

    def lines(self) -> list[str]:
        """Returns the finding for a person, line by line."""
        d = self.difference
        begin = f"The first tensor that differs is the {self.kind} {self.name}"
        if d.shapes:
            partitioned, whole = map(list, d.shapes)
            lines = [f"{begin}: its shape is {partitioned} partitioned, and {whole} whole"]
        else:
            at = f" at {list(d.index)}" if d.index else ""
            values = f"partitioned {d.partitioned:.6g}, whole {d.whole:.6g}{at}"
            lines = [f"{begin}, by {d.relative:.1e}:", f"  {values}"]
        if self.source:
            lines.append(f"  computed at {self.source}")
        if self.likely:
            lines.append(f"  likely: {self.likely}")
        if self.annotation:
            lines.append(f"  nearest annotation: {self.annotation}")
        where = f"for {self.layer or 'this layer'}"
        if not self.collectives:
            lines.append(f"  nearest collective: none was compiled {where}")
        lines += [f"  nearest collective: {each}" for each in self.collectives]
        return lines


class Verification(msgspec.Struct, frozen=True):
    """The comparison of a partitioned computation with the whole one.

    Attributes:
      subject: name of the experiment or function.
      mesh: the mesh, such as "data=4,model=2".
      strategy: the strategy's table.
      notes: what was changed before the comparison, such as sizes.
      tolerance: the largest difference that counts as equal.
      compared: all compared tensors, in the order in which they are computed.
      first: the first tensor that differs; None if all are equal.
      not_verified: what the step computes and the comparison leaves out, and why.
      seconds: wall-clock time.
    """

    subject: str
    mesh: str
    strategy: str
    notes: tuple[str, ...]
    tolerance: float
    compared: tuple[Compared, ...]
    first: Finding | None
    seconds: float
    not_verified: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether all tensors are equal within the tolerance."""
        return self.first is None

    @property
    def largest(self) -> Compared:
        """The tensor with the largest difference."""
        return max(self.compared, key=lambda each: each.difference.relative)

    def lines(self) -> list[str]:
        """Returns the result for a person, line by line."""
        lines = [f"{self.subject} on {self.mesh}, partitioned and whole:", *self.notes]
        lines += [f"not verified: {each}" for each in self.not_verified]
        for kind in KINDS:
            rows = [each for each in self.compared if each.kind == kind]
            if rows:
                worst = max(rows, key=lambda each: each.difference.relative)
                wrong = sum(not each.is_equal for each in rows)
                differ = f"; {wrong} differ" if wrong else ""
                lines.append(
                    f"  {len(rows)} {_plural(kind, len(rows))}: largest difference "
                    f"{worst.difference.relative:.1e}, in {worst.name}{differ}"
                )
        if self.first is None:
            return [*lines, f"equal to {self.largest.difference.relative:.0e}"]
        return [*lines, *self.first.lines()]


def _plural(kind: str, count: int) -> str:
    return kind if count == 1 else f"{kind}es" if kind.endswith("s") else f"{kind}s"
