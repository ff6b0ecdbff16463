"""Gives memory that was freed back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import gc


def give_back() -> None:
    """Gives memory that was freed back to the system.

    XLA's compiler frees hundreds of megabytes in small pieces, which glibc would keep for later.
    """
    gc.collect()
    # Other C libraries lack the function, and keep less.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
