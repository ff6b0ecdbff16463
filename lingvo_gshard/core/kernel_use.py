"""Records which layers of a program use a kernel of the hardware, and why others do not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from lingvo_gshard.core import context
from lingvo_gshard.core.context import Scope


class KernelUse(msgspec.Struct, frozen=True, order=True):
    """Whether a layer of a program uses a kernel.

    Attributes:
      obstacle: why the layer computes with operations of its own; "" if it uses the kernel.
      advice: what would make it faster; "" if nothing is known.
    """

    path: str
    kernel: str
    obstacle: str = ""
    advice: str = ""


_uses: Scope[set[KernelUse] | None] = Scope("kernel uses", None)


@contextlib.contextmanager
def recording() -> Iterator[set[KernelUse]]:
    """Collects which kernels layers use that are traced inside a `with` block."""
    found: set[KernelUse] = set()
    with _uses.use(found):
        yield found


def note(path: str, kernel: str, obstacle: str, advice: str = "") -> None:
    """Records that a layer uses a kernel, or why not; see `KernelUse`."""
    found = _uses.get()
    if found is not None and not context.current().is_recomputing:
        found.add(KernelUse(path, kernel, obstacle, advice))


def uses_in_words(uses: Iterable[KernelUse]) -> list[str]:
    """Returns a sentence for each kernel that layers use, and for each reason why some do not."""
    layers: dict[tuple[str, str, str], list[str]] = {}
    for use in uses:
        key = (use.kernel, use.obstacle, use.advice)
        layers.setdefault(key, []).append(use.path or "the function")
    return [_use_in_words(*key, paths) for key, paths in sorted(layers.items())]


def _use_in_words(kernel: str, obstacle: str, advice: str, paths: Sequence[str]) -> str:
    others = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    if not obstacle:
        advice = f"; {advice}" if advice else ""
        return f"the platform's kernel computes the {kernel} of {paths[0]}{others}{advice}"
    return f"no kernel computes the {kernel} of {paths[0]}{others}: {obstacle}"
