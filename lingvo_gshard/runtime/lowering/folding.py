"""Lowers without TensorFlow's constant folding, which writes counters and masks as literals.

TensorFlow evaluates what depends on no input before it lowers a function for XLA, up to 10 MiB per
tensor. The counters of dropout, for example, then become literals of the global batch's size, and a
program grows with its devices. Without folding they stay iotas, which XLA's partitioner splits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from lingvo_gshard.core.lazy import pywrap_tfe

_lock = threading.Lock()
# Number of threads inside `without_folding`, and the setting before the first one entered.
_inside = 0
_was_disabled = False


@contextlib.contextmanager
def without_folding() -> Iterator[None]:
    """Turns TensorFlow's constant folding for XLA off, for the process, inside the context."""
    global _inside, _was_disabled
    with _lock:
        if not _inside:
            _was_disabled = bool(pywrap_tfe.TF_GetXlaConstantFoldingDisabled())
            pywrap_tfe.TF_SetXlaConstantFoldingDisabled(True)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                pywrap_tfe.TF_SetXlaConstantFoldingDisabled(_was_disabled)
